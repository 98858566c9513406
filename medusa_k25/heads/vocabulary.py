"""The draft vocabulary: the most frequent tokens of the training text, the only ones that heads can draft.

Letters: V target vocabulary, M draft vocabulary, D hidden.
"""

import torch
from torch import Tensor

from medusa_k25.data.labels import IGNORE


class DraftVocabulary:
    """`token_ids_M`: target token ids, ascending; draft index m stands for token_ids_M[m]."""

    def __init__(self, token_ids_M: Tensor, vocab_size: int):
        ids = token_ids_M.long()
        if len(ids) == 0 or (ids.diff() <= 0).any():
            raise ValueError(
                f"draft vocabulary of {len(ids)} ids: expected at least one id, ascending and without repeats; "
                "the map is damaged, train again or take it from another checkpoint"
            )
        if ids[0] < 0 or ids[-1] >= vocab_size:
            raise ValueError(f"draft vocabulary holds id {int(ids[-1])}, the target has {vocab_size} tokens")
        self.token_ids_M, self.vocab_size = ids, vocab_size
        self._draft_index_V = torch.full((vocab_size,), IGNORE)
        self._draft_index_V[ids] = torch.arange(len(ids))

    @classmethod
    def most_frequent(cls, counts_V: Tensor, size: int | None) -> "DraftVocabulary":
        """The `size` most frequent tokens (None: all V of them); ties, and room that is left, go to the lowest ids,
        which are the most frequent merges of a BPE tokenizer."""
        size = len(counts_V) if size is None else size
        if not 1 <= size <= len(counts_V):
            raise ValueError(
                f"draft_vocab_size={size}: expected 1 to {len(counts_V)} (the target's vocabulary) or null"
            )
        order_V = counts_V.sort(descending=True, stable=True).indices
        return cls(order_V[:size].sort().values, len(counts_V))

    def __len__(self) -> int:
        return len(self.token_ids_M)

    def to_draft(self, ids: Tensor) -> Tensor:
        """Draft indices of target ids (any shape); IGNORE for tokens outside, and where `ids` is IGNORE."""
        return torch.where(ids == IGNORE, IGNORE, self._draft_index_V.to(ids.device)[ids.clamp(min=0)])

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return self.token_ids_M.to(draft_ids.device)[draft_ids]

    def rows(self, lm_head_VD: Tensor) -> Tensor:
        """The lm_head rows [M, D] of the draft vocabulary."""
        return lm_head_VD[self.token_ids_M]

    def coverage(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that the draft vocabulary holds."""
        return float(counts_V[self.token_ids_M].sum() / counts_V.sum().clamp(min=1))
