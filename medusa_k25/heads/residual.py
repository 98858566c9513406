"""Medusa-1: every head is a stack of residual blocks on the target's final hidden state.

Letters: N positions, D hidden, K heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads


class ResidualBlock(nn.Module):
    """x + silu(W x + b); W and b start at zero, so that the block starts as the identity."""

    def __init__(self, hidden_size: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + silu(self.linear(x_ND))


class ResidualHeads(Heads):
    """K heads of `num_blocks` blocks each, with a bias a block or without.

    At step 0 every head's feature equals h_t, so its logits are lm_head(h_t) exactly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_blocks: int = 1,
        bias: bool = True,
        own_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ):
        if num_heads < 1 or num_blocks < 1:
            raise ValueError(f"heads need num_heads >= 1 and num_blocks >= 1, got {num_heads} and {num_blocks}")
        super().__init__(hidden_size, num_heads, own_lm_head, draft_vocab_size)
        self.num_blocks, self.bias = num_blocks, bias
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size, bias) for _ in range(num_blocks))) for _ in range(num_heads)
        )

    def forward(self, hidden_ND: Tensor, path_NK: Tensor) -> Tensor:
        """See `Heads.forward`; these heads read nothing but the state."""
        return torch.stack([head(hidden_ND) for head in self.heads])
