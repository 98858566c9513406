"""What every predictor accepts on held-out text: the table that `evaluate` prints.

Letters: S states of one answer, K heads.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_k25.cache import Cache, Document
from medusa_k25.conversations import ends_in_loop
from medusa_k25.data.windows import documents_of, future_of, runs_of
from medusa_k25.heads import DraftVocabulary, Heads
from medusa_k25.metrics import top_accuracy
from medusa_k25.ngram import ngram_accepted
from medusa_k25.replay import Acceptance, answer_ranks, best_tree, interval, walk, walks
from medusa_k25.tree import Tree


@dataclass(frozen=True)
class Row:
    """One predictor with one shape. `interval` is the 95% bootstrap interval of `every.length` over answers."""

    predictor: str
    num_nodes: int  # tokens verified in a pass, the root included
    tree: Tree | None  # None: a chain of looked-up tokens
    every: Acceptance  # all held-out answers
    without_loops: Acceptance  # those that do not end in a repetition loop
    interval: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        tree = None if self.tree is None else [list(path) for path in self.tree.paths]
        acceptances = {"every": _as_json(self.every), "without_loops": _as_json(self.without_loops)}
        return {"predictor": self.predictor, "num_nodes": self.num_nodes, "tree": tree, "interval": self.interval} | (
            acceptances
        )


def _as_json(acceptance: Acceptance) -> dict[str, Any]:
    return asdict(acceptance) | {"length": acceptance.length, "passes_saved": acceptance.passes_saved}


@dataclass(frozen=True)
class Evaluation:
    """`accuracy_KR[k][r]`: share of held-out labels of head k+1 among its r+1 best choices; misses count as wrong."""

    answers: int
    loops: int
    rows: list[Row]
    accuracy_KR: list[list[float]]

    def row(self, predictor: str, num_nodes: int) -> Row:
        return next(row for row in self.rows if (row.predictor, row.num_nodes) == (predictor, num_nodes))

    def as_json(self) -> dict[str, Any]:
        rows = [row.as_json() for row in self.rows]
        return {"answers": self.answers, "loops": self.loops, "accuracy": self.accuracy_KR, "rows": rows}


class Evaluator:
    """`num_nodes`: tree sizes to report, root included. Trees use at most `max_width` choices of a head."""

    def __init__(self, num_nodes: Sequence[int], max_width: int, ngram_longest: int):
        if not num_nodes or min(num_nodes) < 2:
            raise ValueError(f"evaluate.num_nodes={list(num_nodes)}: a pass verifies 2 tokens or more, root included")
        self.num_nodes, self.max_width, self.ngram_longest = sorted(set(num_nodes)), max_width, ngram_longest

    def run(
        self, cache: Cache, heads: Heads, untrained: Heads, vocabulary: DraftVocabulary, lm_head_MD: Tensor
    ) -> Evaluation:
        """Trees are chosen on calibration text, for each set of heads its own; everything is reported on held-out."""
        heldout = documents_of(cache, "heldout")
        loop = [
            ends_in_loop(cache.token_ids(document)[cache.loss_mask(document)].tolist())
            for document in heldout
            for _ in runs_of(cache, document)
        ]
        rows = []

        def add(predictor: str, num_nodes: int, tree: Tree | None, walked: list[Acceptance]) -> None:
            calm = [one for one, looping in zip(walked, loop, strict=True) if not looping]
            whole = sum(walked, Acceptance())
            rows.append(Row(predictor, num_nodes, tree, whole, sum(calm, Acceptance()), interval(walked)))

        for n in self.num_nodes:
            add("n-gram lookup", n, None, [walk(a.tolist()) for a in self._looked_up(cache, heldout, n - 1)])
        for name, some_heads in (("untrained heads", untrained), ("heads", heads)):
            calibration = answer_ranks(some_heads, lm_head_MD, vocabulary, cache, documents_of(cache, "calibration"))
            ranks = answer_ranks(some_heads, lm_head_MD, vocabulary, cache, heldout)
            for depth in range(1, heads.num_heads + 1):
                chain = Tree.chain(depth)
                add(f"{name}, chain", chain.num_nodes, chain, walks(ranks, chain))
            for n in self.num_nodes:
                tree = best_tree(calibration, n, self.max_width)
                add(f"{name}, tree", n, tree, walks(ranks, tree))
        exists = torch.cat(
            [
                future_of(cache, run, heads.num_heads)[:, 1:] >= 0
                for document in heldout
                for run in runs_of(cache, document)
            ]
        )
        hits_KR, count_K = top_accuracy(torch.cat(ranks).T, exists.T)
        return Evaluation(len(loop), sum(loop), rows, (hits_KR / count_K[:, None].clamp(min=1)).tolist())

    def _looked_up(self, cache: Cache, documents: Sequence[Document], num_drafts: int) -> list[Tensor]:
        accepted = []
        for document in documents:
            ids_T, positions_M = cache.token_ids(document), cache.shard_positions(document.shard) - document.start
            for run in runs_of(cache, document):
                first_root = int(positions_M[run.row_start]) + 1
                answer_stop = int(positions_M[run.row_stop - 1]) + 3
                accepted.append(ngram_accepted(ids_T[:answer_stop], first_root, num_drafts, self.ngram_longest))
        return accepted
