"""Where a predictor's drafts are accepted: by topic, label, place in the answer, thoughts or answer, and depth.

Every part names its passes and documents and has an interval, so that small ones can be told.

Letters: I texts, P passes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from medusa_k25.data.texts import Text
from medusa_k25.replay import Passes, Resampling

POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384, 65536)  # tokens of the answer


@dataclass(frozen=True)
class Part:
    """Some of the verify passes. length: tokens emitted a pass; interval: 95% of it, by resampling documents."""

    name: str
    documents: int
    passes: int
    emitted: int
    length: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Breakdown:
    """Parts without a pass are left out; so are groups and labels where no text has one, thoughts where none has any.

    sections: "thoughts" and "answer"; positions: of the first token that a pass emits, within the answer.
    accepted_share[d - 1]: share of the passes that accept d drafts or more, up to the most that any accepted.
    """

    passes: int
    groups: list[Part]
    labels: list[Part]
    positions: list[Part]
    sections: list[Part]
    accepted_share: list[float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def break_down(texts: Sequence[Text], passes: Passes, resampling: Resampling, num_nodes: int) -> Breakdown:
    """passes: of `walk_all` over `texts`, each of at most `num_nodes` tokens; resampling: of the texts' documents."""

    def parts(names: Sequence[str], number_P: Tensor) -> list[Part]:
        """number_P: which of the names each pass belongs to, -1 for none."""
        found = []
        for i, name in enumerate(names):
            some = passes.where(number_P == i)
            if len(some.text_P):
                documents = len(resampling.document_I[some.text_P].unique())
                counts = some.acceptance
                interval = resampling.interval(some, num_nodes) if documents > 1 else (1.0, float(num_nodes))
                found.append(Part(name, documents, counts.passes, counts.emitted, counts.length, interval))
        return found

    def by_text(names: Sequence[str | None]) -> list[Part]:
        known = sorted({name for name in names if name is not None})
        number_I = torch.tensor([-1 if name is None else known.index(name) for name in names])
        return parts(known, number_I[passes.text_P])

    token_P = passes.state_P + 1
    bins = [f"{low:,} to {high - 1:,}" for low, high in pairwise(POSITION_EDGES)]
    bins.append(f"{POSITION_EDGES[-1]:,} and on")
    edges = torch.tensor(POSITION_EDGES)
    answer_at_I = torch.tensor([text.answer_at for text in texts])
    in_answer_P = (token_P >= answer_at_I[passes.text_P]).long()
    reached = torch.bincount(passes.accepted_P).flip(0).cumsum(0).flip(0)  # [d]: passes that accept d or more
    return Breakdown(
        len(token_P),
        by_text([text.group for text in texts]),
        by_text([text.label for text in texts]),
        parts(bins, torch.searchsorted(edges, token_P, right=True) - 1),
        parts(("thoughts", "answer"), in_answer_P) if answer_at_I.any() else [],
        (reached[1:] / len(token_P)).tolist(),
    )
