"""Designs compared on the same held-out text: a design is a set of runs that differ in the seed only.

A figure of a design is the mean over its runs. Its 95% interval is of draws of both documents and seeds, each with
replacement: what other prompts of the same topics and other seeds would have given. All designs see the same draws, so
that their differences have intervals, too: of the differences, draw by draw. Few seeds underrate their own spread (of
three, the standard deviation is too small by a factor of 0.82), so each run's figure is kept beside them.

Letters: S seeds, I texts, B draws, K heads, M draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from medusa_k25.acceptance import Predictor, Replayed, known
from medusa_k25.data.texts import Text
from medusa_k25.heads import Heads
from medusa_k25.prompts import KINDS, OTHER_KIND, kind_of
from medusa_k25.replay import between
from medusa_k25.tree import Tree

EVERY, CALM = "all answers", "without loops"

Key = tuple[str, int, str]  # predictor, nodes of a pass (the root included), part of the text


@dataclass(frozen=True, eq=False)
class Measured:
    """Acceptance length of one predictor in passes of one size on one part of the text: on all of it, and by draw."""

    length: float
    lengths_B: Tensor


def parts_of(texts: Sequence[Text]) -> dict[str, Tensor]:
    """bool [I] of each part of the text that is reported apart; a kind that no text is of is left out."""
    kinds = [kind_of(text.group) for text in texts]
    parts = {
        EVERY: torch.ones(len(texts), dtype=torch.bool),
        CALM: torch.tensor([not text.loops for text in texts]),
        **{kind: torch.tensor([each == kind for each in kinds]) for kind in (*KINDS, OTHER_KIND)},
    }
    return {name: part_I for name, part_I in parts.items() if part_I.any()}


def measure(
    replayed: Replayed, parts: Mapping[str, Tensor], predictor: Predictor, sizes: Sequence[int]
) -> dict[Key, Measured]:
    """parts: of `parts_of` the held-out text."""
    found = {}
    for nodes in sizes:
        passes = replayed.passes(predictor, nodes)
        for part, kept_I in parts.items():
            some = passes.where(kept_I[passes.text_P])
            lengths_B = replayed.resampling.lengths(some)
            found[predictor.name, nodes, part] = Measured(some.acceptance.length, lengths_B)
    return found


@dataclass(frozen=True)
class Cell:
    """Acceptance length of a design: mean over seeds, its 95% interval, each run's; and how much it is above the
    reference's, with the interval of that. None: unknown (the text is of one document), or it is the reference."""

    predictor: str
    nodes: int
    part: str
    mean: float
    interval: tuple[float, float]
    runs: list[float]
    difference: float | None = None
    difference_interval: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        low, high = self.difference_interval or (float("nan"),) * 2
        return {
            "predictor": self.predictor,
            "nodes": self.nodes,
            "part": self.part,
            "mean": self.mean,
            "interval": [known(value) for value in self.interval],
            "runs": self.runs,
            "difference": self.difference,
            "difference_interval": None if isnan(low) or isnan(high) else [low, high],
        }


def draws_of(runs: Sequence[Measured]) -> Tensor:
    """Mean over seeds in each draw [B]: draw b takes documents as `Resampling` does, and as many of the runs as there
    are, with replacement. Which ones depends on their number alone, so designs with as many seeds share the draws."""
    lengths_BS = torch.stack([run.lengths_B for run in runs], dim=1)
    generator = torch.Generator().manual_seed(len(runs))
    drawn_BS = torch.randint(len(runs), lengths_BS.shape, generator=generator)
    return lengths_BS.gather(1, drawn_BS).mean(dim=1)


def cells(
    runs: Sequence[Mapping[Key, Measured]], reference: Sequence[Mapping[Key, Measured]] | None = None
) -> list[Cell]:
    """Of a design, given by what was measured of each of its runs, in the order of their seeds: whatever all have.

    reference: the runs of the design that it is compared with.
    """
    found = []
    for key in (key for key in runs[0] if all(key in run for run in runs)):
        measured = [run[key] for run in runs]
        mean, mean_B = sum(each.length for each in measured) / len(runs), draws_of(measured)
        cell = Cell(*key, mean, between(mean_B), [each.length for each in measured])
        if reference is not None and all(key in run for run in reference):
            others = [run[key] for run in reference]
            difference = mean - sum(each.length for each in others) / len(others)
            cell = Cell(*key, mean, cell.interval, cell.runs, difference, between(mean_B - draws_of(others)))
        found.append(cell)
    return found


def drafting_flops(heads: Heads, draft_vocab_size: int, tree: Tree) -> int:
    """Of all products that draft this tree once. Heads that read the path draft once for every path that the tree goes
    on below, all others once in all; heads deeper than the tree do not."""
    rows = draft_vocab_size * heads.hidden_size
    below = [{path[:-1] for path in tree.paths if len(path) == k} for k in range(1, heads.num_heads + 1)]
    times_K = [len(paths) if heads.reads == "path" else min(len(paths), 1) for paths in below]
    return 2 * sum(times * (product + rows) for times, product in zip(times_K, heads.products, strict=True))
