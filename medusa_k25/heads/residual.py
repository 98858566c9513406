"""Medusa-1: every head is a stack of residual blocks on the target's final hidden state.

Letters: N positions, D hidden, K heads.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads, zeroed


class ResidualBlock(nn.Module):
    """x + silu(W x + b); W and b start at zero, so that the block starts as the identity."""

    def __init__(self, hidden_size: int, bias: bool):
        super().__init__()
        self.linear = zeroed(nn.Linear(hidden_size, hidden_size, bias))

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + silu(self.linear(x_ND))


class ResidualHeads(Heads):
    """K heads of `num_blocks` blocks each on the hidden state, with a bias a block or without."""

    reads = "state"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        num_blocks: int = 1,
        bias: bool = True,
        own_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ):
        super().__init__(hidden_size, num_heads, own_lm_head, draft_vocab_size)
        if num_blocks < 1:
            raise ValueError(f"residual heads need num_blocks >= 1, got {num_blocks}")
        self.num_blocks, self.bias = num_blocks, bias
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size, bias) for _ in range(num_blocks))) for _ in range(num_heads)
        )

    def step(self, k: int, state_NS: Tensor, token_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.heads[k - 1](state_NS), state_NS

    @property
    def products(self) -> Sequence[int]:
        D = self.hidden_size
        return [self.num_blocks * D * (D + self.bias)] * self.num_heads

    @property
    def trained_inputs(self) -> int:  # all blocks but the first, which reads the cached state
        return sum(self.products) * (self.num_blocks - 1) // self.num_blocks

    @property
    def saved_numbers(self) -> int:
        return (self.num_heads * (2 * self.num_blocks + 2) + 1) * self.hidden_size
