"""Hydra: every head has a matrix of its own, and sees the tokens on the path to its guess.

Letters: N positions, D hidden, K heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads, zeroed


class HydraHeads(Heads):
    """Head k is h_t + silu(W_k [h_t; e(x_{t+1}); ..; e(x_{t+k})] + b_k), with W_k and b_k zero at first.

    bias: whether there is b_k. A path's state is what its next head reads but for the last token: it grows by D a step.
    """

    reads = "path"

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
        self.heads = nn.ModuleList(
            zeroed(nn.Linear((k + 1) * hidden_size, hidden_size, bias)) for k in range(1, num_heads + 1)
        )

    def step(self, k: int, state_NS: Tensor, token_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        assert token_ND is not None
        state_NS = torch.cat([state_NS, token_ND], dim=1)
        return state_NS[:, : self.hidden_size] + silu(self.heads[k - 1](state_NS)), state_NS

    @property
    def products(self) -> Sequence[int]:
        D = self.hidden_size
        return [D * ((k + 1) * D + self.bias) for k in range(1, self.num_heads + 1)]

    @property
    def trained_inputs(self) -> int:
        return 0

    @property
    def saved_numbers(self) -> int:
        return (sum(k + 5 for k in range(1, self.num_heads + 1)) + 1) * self.hidden_size
