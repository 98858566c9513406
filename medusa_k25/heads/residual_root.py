"""Medusa heads that also see the token which the target has just produced. All of them still draft at once.

Letters: N positions, D hidden, K heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads, zeroed


class ResidualRootHeads(Heads):
    """Head k is h_t + silu(W_k [h_t; e(x_{t+1})] + b_k), with W_k and b_k zero at first. bias: whether there is b_k."""

    reads = "root"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        bias: bool = True,
        own_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ):
        super().__init__(hidden_size, num_heads, own_lm_head, draft_vocab_size)
        self.bias = bias
        self.heads = nn.ModuleList(zeroed(nn.Linear(2 * hidden_size, hidden_size, bias)) for _ in range(num_heads))

    def step(self, k: int, state_NS: Tensor, token_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        if token_ND is not None:  # the root: from head 1 on the state is [h_t; e(x_{t+1})]
            state_NS = torch.cat([state_NS, token_ND], dim=1)
        return state_NS[:, : self.hidden_size] + silu(self.heads[k - 1](state_NS)), state_NS

    @property
    def products(self) -> Sequence[int]:
        D = self.hidden_size
        return [D * (2 * D + self.bias)] * self.num_heads

    @property
    def trained_inputs(self) -> int:
        return 0

    @property
    def saved_numbers(self) -> int:
        return (self.num_heads * 4 + 3) * self.hidden_size
