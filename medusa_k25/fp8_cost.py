"""What storing states as fp8 (one scale a token) costs, measured on states that are stored wider.

Letters: N positions, D hidden, V vocabulary, M draft vocabulary, K heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_k25.cache import Cache, Document
from medusa_k25.cache.alignment import first_choices
from medusa_k25.cache.check import spread
from medusa_k25.cache.writer import quantise
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import Speculator
from medusa_k25.replay import future_ranks

MOST_POSITIONS = 4096
LEAST_POSITIONS = 256
MOST_PRODUCTS = 3 * 10**11  # multiplications and additions that are spent on each figure: seconds on a few cores


@dataclass(frozen=True)
class HeadCost:
    """Of one head, on the same labels with states as stored and rounded. A label it cannot draft is a miss in both."""

    labels: int
    hits: int  # labels that are the head's first choice, with the states as stored
    gained: int  # that become its first choice when they are rounded
    lost: int  # that no longer are

    @property
    def points(self) -> float:
        """Change of its top-1 accuracy in percentage points, negative for a loss."""
        return 100 * (self.gained - self.lost) / max(self.labels, 1)

    @property
    def points_error(self) -> float:
        """Its standard error: what would be there if gains and losses were tosses of a coin."""
        return 100 * (self.gained + self.lost) ** 0.5 / max(self.labels, 1)


def rounded(hidden_ND: Tensor) -> Tensor:
    """The states as an fp8 cache would give them back, fp32."""
    fp8_ND, scales_N = quantise(hidden_ND)
    return fp8_ND.float() * scales_N[:, None]


def affordable(products_a_position: int) -> int:
    return max(LEAST_POSITIONS, min(MOST_POSITIONS, MOST_PRODUCTS // products_a_position))


@torch.no_grad()
def argmax_agreement(cache: Cache, lm_head_VD: Tensor) -> tuple[float, int]:
    """(share of positions whose argmax over the vocabulary stays the same, how many were sampled, over all shards)."""
    positions = affordable(4 * lm_head_VD.numel())
    documents = [cache.documents[i] for i in spread(len(cache.documents), positions)]
    each = -(-positions // max(len(documents), 1))
    states_ND = torch.cat(
        [
            cache.read_rows(document.shard, document.row_start + row, document.row_start + row + 1).float()
            for document in documents
            for row in spread(document.row_stop - document.row_start, each)
        ]
    )[:positions]
    pairs = zip(first_choices(states_ND, lm_head_VD), first_choices(rounded(states_ND), lm_head_VD), strict=True)
    return sum(one == other for one, other in pairs) / len(states_ND), len(states_ND)


@torch.no_grad()
def head_costs(cache: Cache, documents: list[Document], speculator: Speculator) -> list[HeadCost]:
    """Of each head, on whole answers of `documents` (held-out text), evenly spread where there are too many."""
    heads = speculator.heads
    positions = affordable(4 * (heads.num_heads * speculator.lm_head_MD.numel() + sum(heads.products)))
    counts_4K = torch.zeros(4, heads.num_heads, dtype=torch.long)  # labels, hits, gained, lost
    for hidden_ND, future_NK in _spread_answers(cache, documents, heads.num_heads, positions):
        stored_NK, rounded_NK = (
            future_ranks(speculator, states_ND, future_NK) == 0 for states_ND in (hidden_ND, rounded(hidden_ND))
        )
        one_of_each = (future_NK[:, 1:] >= 0, stored_NK, rounded_NK & ~stored_NK, stored_NK & ~rounded_NK)
        counts_4K += torch.stack([flags_NK.sum(dim=0) for flags_NK in one_of_each])
    return [HeadCost(*counts) for counts in counts_4K.T.tolist()]


def _spread_answers(
    cache: Cache, documents: list[Document], num_heads: int, positions: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Answers as `answers_of` gives them, of as many documents as have about so many states together."""
    states = sum(document.row_stop - document.row_start for document in documents)
    count = len(documents) if states <= positions else max(1, len(documents) * positions // states)
    for index in spread(len(documents), count):
        yield from answers_of(cache, documents[index], num_heads)
