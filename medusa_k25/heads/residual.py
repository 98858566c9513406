"""Medusa-1: every head is a stack of residual blocks on the target's final hidden state.

Letters: N positions, D hidden, K heads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads


class ResidualBlock(nn.Module):
    """x + silu(W x + b); W and b start at zero, so that the block starts as the identity."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + silu(self.linear(x_ND))


class ResidualHeads(Heads):
    """K heads of `num_blocks` blocks each; the target's lm_head turns their features into logits.

    At step 0 every head's feature equals h_t, so its logits are lm_head(h_t) exactly.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, num_blocks: int = 1):
        super().__init__()
        if num_heads < 1 or num_blocks < 1:
            raise ValueError(f"heads need num_heads >= 1 and num_blocks >= 1, got {num_heads} and {num_blocks}")
        self.hidden_size, self.num_heads, self.num_blocks = hidden_size, num_heads, num_blocks
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_blocks))) for _ in range(num_heads)
        )

    def forward(self, hidden_ND: Tensor, path_NK: Tensor) -> Tensor:
        """See `Heads.forward`; these heads read nothing but the state."""
        return torch.stack([head(hidden_ND) for head in self.heads])
