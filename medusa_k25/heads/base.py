"""What every head architecture offers.

Letters: N positions, D hidden, K heads, M draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from medusa_k25.heads.lm_heads import LmHeads, Result


class Heads(nn.Module, ABC):
    """K heads over one hidden state. Constructor arguments are kept as attributes: checkpoints record them.

    The logits of head k are lm_head of its features: the target's own rows of the draft vocabulary, shared by all
    heads, or with `own_lm_head` a trained matrix [M, D] a head, `draft_vocab_size` = M rows each. Features become
    logits through `with_lm_head` alone, which knows which.
    """

    def __init__(
        self, hidden_size: int, num_heads: int = 4, own_lm_head: bool = False, draft_vocab_size: int | None = None
    ):
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.own_lm_head, self.draft_vocab_size = own_lm_head, draft_vocab_size
        self.lm_heads: LmHeads | None = None
        if own_lm_head:
            if draft_vocab_size is None:
                raise ValueError(
                    "own_lm_head=true needs draft_vocab_size, the rows of each head's lm_head, got none; "
                    "give it, or share the target's lm_head with own_lm_head=false"
                )
            self.lm_heads = LmHeads(num_heads, draft_vocab_size, hidden_size)

    @abstractmethod
    def forward(self, hidden_ND: Tensor, path_NK: Tensor) -> Tensor:
        """Features [K, N, D]. At step 0 they equal h_t.

        hidden_ND: h_t. path_NK int64: the tokens known when head k drafts, x_{t+1} (the root) .. x_{t+K}; head k
        (1-based) may read the first k columns. IGNORE stands for a token beyond the answer's end.
        """

    def with_lm_head(self, lm_head_MD: Tensor, use: Callable[[Tensor], Result]) -> Result:
        """What `use` returns for the heads' lm_head: lm_head_MD [M, D] where they share it, their own [K, M, D] else.

        `features_KND @ lm_head.mT` are the logits [K, N, M] of either; `lm_head.expand(K, -1, -1)` is one a head.
        """
        return use(lm_head_MD) if self.lm_heads is None else self.lm_heads(use)

    @torch.no_grad()
    def init_lm_heads(self, lm_head_MD: Tensor) -> None:
        """Start own lm_heads as copies of the target's rows lm_head_MD; heads that share them need none."""
        if self.lm_heads is not None:
            assert lm_head_MD.shape == self.lm_heads.weight.shape[1:]
            self.lm_heads.weight.copy_(lm_head_MD)
