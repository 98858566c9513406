"""One recurrent cell for all heads: a drafted token moves the hidden state to where the target's would be after it.

Letters: N positions, D hidden, K heads, I inner.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_k25.heads.base import Heads, zeroed


class RecurrentHeads(Heads):
    """s_0 = h_t, s_k = s_{k-1} + B silu(A [s_{k-1}; e(x_{t+k})] + a); head k's feature is s_k. B is zero at first.

    inner_size: I, the rows of A; None for 2 D. bias: whether there is a. All heads share A, B and a.
    """

    reads = "path"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        inner_size: int | None = None,
        bias: bool = True,
        own_lm_head: bool = False,
        draft_vocab_size: int | None = None,
    ):
        super().__init__(hidden_size, num_heads, own_lm_head, draft_vocab_size)
        if inner_size is not None and inner_size < 1:
            raise ValueError(
                f"recurrent heads need inner_size >= 1, or null for twice the hidden size, got {inner_size}"
            )
        self.inner_size = inner_size or 2 * hidden_size
        self.bias = bias
        self.inner = nn.Linear(2 * hidden_size, self.inner_size, bias)
        self.outer = zeroed(nn.Linear(self.inner_size, hidden_size, bias=False))

    def step(self, k: int, state_NS: Tensor, token_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        assert token_ND is not None
        state_NS = state_NS + self.outer(silu(self.inner(torch.cat([state_NS, token_ND], dim=1))))
        return state_NS, state_NS

    @property
    def products(self) -> Sequence[int]:
        D, inner = self.hidden_size, self.inner_size
        return [inner * (3 * D + self.bias)] * self.num_heads

    @property
    def trained_inputs(self) -> int:  # B's, and A's but for the first step's: e(x) is joined to a trained state
        D, inner = self.hidden_size, self.inner_size
        return inner * D * (3 * self.num_heads - 2)

    @property
    def saved_numbers(self) -> int:  # and the gradients of the last step's inner numbers
        return self.num_heads * (5 * self.hidden_size + 2 * self.inner_size) + self.hidden_size + 2 * self.inner_size
