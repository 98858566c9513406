"""What every predictor accepts on held-out text: the table that `evaluate` prints.

Letters: S states of one answer, N of all, K heads, R choices of a head.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_k25.cache import Cache
from medusa_k25.data.splits import Split
from medusa_k25.data.texts import Text, texts_of_cache
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import DraftVocabulary, Heads
from medusa_k25.metrics import top_accuracy
from medusa_k25.ngram import ngram_accepted
from medusa_k25.replay import Acceptance, Passes, Resampling, answer_ranks, grow, grow_where_walks_stop, walk_all
from medusa_k25.tree import Growth, Tree, places

ALL_SIZES = range(2, 65)  # of trees, in tree_sizes
MOST_LOOKED_UP = 4  # nodes of a pass that a looked-up chain may take from the tree
SHORTEST_MATCHES = (1, 2, 3, 4)


class Predictor(Protocol):
    @property
    def name(self) -> str: ...

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        """For each text int64 [S]: drafts that a pass of `num_nodes` tokens, root included, accepts from each state."""
        ...


@dataclass(frozen=True)
class NgramLookup:
    """What followed the latest occurrence of the last tokens in the own context, as a chain."""

    longest: int
    name: str = "n-gram lookup"

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        return [ngram_accepted(text.ids_T, text.start, num_nodes - 1, self.longest) for text in texts]


@dataclass(frozen=True)
class HeadsTree:
    """Heads in the tree of each size that `growth` gives. ranks: of a text's labels, int64 [S, K] (`answer_ranks`)."""

    name: str
    growth: Growth
    ranks: Mapping[Text, Tensor]

    def tree(self, num_nodes: int) -> Tree:
        return self.growth.tree(num_nodes)

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        accepted_N = self.tree(num_nodes).accepted(torch.cat([self.ranks[text] for text in texts]))
        return list(accepted_N.split([text.num_states for text in texts]))


@dataclass(frozen=True)
class Share:
    """How a pass is split where the own context was looked up with success: `chain` nodes for what followed there, the
    rest for the tree. shortest: tokens that must have matched; elsewhere the tree has all nodes."""

    chain: int
    shortest: int


@dataclass(frozen=True)
class HeadsBesideLookup:
    """Heads, and beside their tree the continuation of a match; a pass verifies `num_nodes` tokens with or without.

    A server drafts both below one root, so it accepts the longer of the two. looked_up: for every text the drafts that
    a chain of at least MOST_LOOKED_UP looked-up tokens gets accepted at each state, and how many tokens had matched,
    int64 [S] each. How a pass is split is chosen on `calibration` for each size, no chain included.
    """

    name: str
    heads: HeadsTree
    looked_up: Mapping[Text, tuple[Tensor, Tensor]]
    calibration: Sequence[Text]
    _shares: dict[int, Share] = field(default_factory=dict, repr=False)

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        return self.accepted_with(self.share(num_nodes), texts, num_nodes)

    def share(self, num_nodes: int) -> Share:
        """The one that accepts most on calibration text; of equal ones the shortest chain."""
        if num_nodes not in self._shares:
            chains = range(1, min(MOST_LOOKED_UP, num_nodes - 1) + 1)
            shares = [Share(0, 1), *(Share(chain, shortest) for chain in chains for shortest in SHORTEST_MATCHES)]

            def length(share: Share) -> float:
                return walk_all(self.accepted_with(share, self.calibration, num_nodes)).acceptance.length

            self._shares[num_nodes] = max(shares, key=length)
        return self._shares[num_nodes]

    def accepted_with(self, share: Share, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        whole = self.heads.accepted(texts, num_nodes)
        if share.chain == 0:
            return whole
        smaller = self.heads.accepted(texts, num_nodes - share.chain)
        return [
            torch.where(matched_S >= share.shortest, smaller_S.maximum(looked_S.clamp(max=share.chain)), whole_S)
            for whole_S, smaller_S, (looked_S, matched_S) in zip(
                whole, smaller, (self.looked_up[text] for text in texts), strict=True
            )
        ]


@dataclass(frozen=True)
class Row:
    """One predictor with one shape. Intervals: 95%, by resampling documents, of the length beside them.

    calibration: what the tree was chosen on; much more there than on held-out text is overfitting.
    """

    predictor: str
    num_nodes: int  # tokens verified in a pass, the root included
    tree: Tree | None  # None: no tree of heads
    every: Acceptance  # all held-out answers
    without_loops: Acceptance  # those that do not end in a repetition loop
    interval: tuple[float, float]
    without_loops_interval: tuple[float, float]
    calibration: Acceptance

    def as_json(self) -> dict[str, Any]:
        tree = None if self.tree is None else [list(path) for path in self.tree.paths]
        return {
            "predictor": self.predictor,
            "num_nodes": self.num_nodes,
            "tree": tree,
            "interval": self.interval,
            "without_loops_interval": self.without_loops_interval,
            "every": _as_json(self.every),
            "without_loops": _as_json(self.without_loops),
            "calibration": _as_json(self.calibration),
        }


def _as_json(acceptance: Acceptance) -> dict[str, Any]:
    return asdict(acceptance) | {"length": acceptance.length, "passes_saved": acceptance.passes_saved}


@dataclass(frozen=True)
class TreeSize:
    """A tree of one size, and the acceptance length on the text that it was chosen on and on held-out text.

    chosen: "joint" (`Growth.by_count`), "stops" (`grow_where_walks_stop`) or "product" (`Growth.by_product`).
    """

    chosen: str
    num_nodes: int
    depth: int
    width: int
    calibration: float
    heldout: float


@dataclass(frozen=True)
class Evaluation:
    """`accuracy_KR[k][r]`: share of held-out labels of head k+1 among its r+1 best choices; misses count as wrong.

    labels_K: how many labels each head has there. Both, and `trees`, are empty without heads.
    """

    answers: int
    loops: int
    rows: list[Row]
    accuracy_KR: list[list[float]]
    labels_K: list[int]
    trees: list[TreeSize]

    def row(self, predictor: str, num_nodes: int) -> Row:
        return next(row for row in self.rows if (row.predictor, row.num_nodes) == (predictor, num_nodes))

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "loops": self.loops,
            "accuracy": self.accuracy_KR,
            "labels": self.labels_K,
            "rows": [row.as_json() for row in self.rows],
            "trees": [asdict(tree) for tree in self.trees],
        }


@dataclass(frozen=True)
class Replayed:
    """Held-out text to report on, calibration text to choose on, and the draws of held-out documents."""

    heldout: Sequence[Text]
    calibration: Sequence[Text]

    def __post_init__(self) -> None:
        for split, texts in (("held-out", self.heldout), ("calibration", self.calibration)):
            if not texts:
                raise ValueError(
                    f"the {split} split holds no answer of two tokens or more: there is nothing to "
                    f"{'report on' if split == 'held-out' else 'choose a tree on'}; add more conversations"
                )

    @cached_property
    def resampling(self) -> Resampling:
        return Resampling([text.document for text in self.heldout])

    @cached_property
    def loops_I(self) -> Tensor:
        return torch.tensor([text.loops for text in self.heldout])

    def passes(self, predictor: Predictor, num_nodes: int) -> Passes:
        return walk_all(predictor.accepted(self.heldout, num_nodes))

    def row(self, predictor: Predictor, num_nodes: int) -> Row:
        passes = self.passes(predictor, num_nodes)
        calm = passes.where(~self.loops_I[passes.text_P])
        return Row(
            predictor.name,
            num_nodes,
            predictor.tree(num_nodes) if isinstance(predictor, HeadsTree) else None,
            passes.acceptance,
            calm.acceptance,
            self.resampling.interval(passes, num_nodes),
            self.resampling.interval(calm, num_nodes),
            walk_all(predictor.accepted(self.calibration, num_nodes)).acceptance,
        )


def ranks_of(
    heads: Heads, lm_head_MD: Tensor, vocabulary: DraftVocabulary, cache: Cache, texts: Mapping[Split, Sequence[Text]]
) -> dict[Text, Tensor]:
    """`answer_ranks` of every text. texts: of `texts_of_cache`, whole splits."""
    ranks: dict[Text, Tensor] = {}
    for split, some in texts.items():
        found = answer_ranks(heads, lm_head_MD, vocabulary, cache, documents_of(cache, split))
        ranks |= zip(some, found, strict=True)
    return ranks


def has_label(text: Text, num_heads: int) -> Tensor:
    """bool [S, K]: whether head k's label at a state lies within the answer."""
    return torch.arange(text.num_states)[:, None] + torch.arange(1, num_heads + 1) <= text.num_states


def accuracy(ranks: Mapping[Text, Tensor], texts: Sequence[Text], best: Iterable[int]) -> tuple[Tensor, Tensor]:
    """(hits int64 [K, R], labels int64 [K]) of `top_accuracy` over texts; best: R numbers of best choices."""
    ranks_NK = torch.cat([ranks[text] for text in texts])
    exists_NK = torch.cat([has_label(text, ranks_NK.shape[1]) for text in texts])
    return top_accuracy(ranks_NK.T, exists_NK.T, list(best))


def product_growth(ranks: Mapping[Text, Tensor], texts: Sequence[Text], most_nodes: int, max_width: int) -> Growth:
    """`Growth.by_product` of the heads' accuracies on `texts`."""
    hits_KR, labels_K = accuracy(ranks, texts, range(1, max_width + 1))
    at_rank_KR = hits_KR.diff(dim=1, prepend=torch.zeros_like(hits_KR[:, :1]))
    return Growth.by_product((at_rank_KR / labels_K[:, None].clamp(min=1)).tolist(), most_nodes)


def tree_sizes(
    chosen: str, growth: Growth, ranks: Mapping[Text, Tensor], replayed: Replayed, sizes: Iterable[int] = ALL_SIZES
) -> list[TreeSize]:
    """Trees of all sizes that `growth` has paths for."""
    lengths: dict[int, list[float]] = {n: [] for n in sizes if n <= growth.most_nodes}
    for texts in (replayed.calibration, replayed.heldout):
        places_NK = places(growth.paths, torch.cat([ranks[text] for text in texts]))
        states = [text.num_states for text in texts]
        for n in lengths:
            accepted_N = (places_NK < n - 1).sum(dim=1)  # the first n - 1 paths are the tree of n nodes
            lengths[n].append(walk_all(accepted_N.split(states)).acceptance.length)
    trees = {n: growth.tree(n) for n in lengths}
    return [TreeSize(chosen, n, trees[n].depth, trees[n].width, *both) for n, both in lengths.items()]


class Evaluator:
    """`num_nodes`: sizes of a pass to report, root included. Trees use at most `max_width` choices of a head."""

    def __init__(self, num_nodes: Sequence[int | None], max_width: int, ngram_longest: int):
        sizes = sorted({nodes for nodes in num_nodes if nodes is not None})
        if not sizes or sizes[0] < 2:
            raise ValueError(f"evaluate.num_nodes={list(num_nodes)}: a pass verifies 2 tokens or more, root included")
        self.num_nodes, self.max_width, self.ngram_longest = sizes, max_width, ngram_longest

    def of_cache(self, cache: Cache, heads: Heads, vocabulary: DraftVocabulary, lm_head_MD: Tensor) -> Evaluation:
        """n-gram lookup and heads, on the text of the cache that the heads read."""
        texts: dict[Split, list[Text]] = {split: texts_of_cache(cache, split) for split in ("calibration", "heldout")}
        replayed = Replayed(texts["heldout"], texts["calibration"])
        ranks = ranks_of(heads, lm_head_MD, vocabulary, cache, texts)
        return self.run(replayed, [NgramLookup(self.ngram_longest)], ranks)

    def run(
        self, replayed: Replayed, predictors: Sequence[Predictor], ranks: Mapping[Text, Tensor] | None = None
    ) -> Evaluation:
        """Everything is chosen on calibration text and reported on held-out text.

        ranks: of the heads' labels in both, None without heads. predictors: the others, each at all sizes.
        """
        rows = [replayed.row(predictor, n) for predictor in predictors for n in self.num_nodes]
        accuracy_KR: list[list[float]] = []
        labels: list[int] = []
        trees: list[TreeSize] = []
        if ranks is not None:
            hits_KR, labels_K = accuracy(ranks, replayed.heldout, range(1, 6))
            accuracy_KR, labels = (hits_KR / labels_K[:, None].clamp(min=1)).tolist(), labels_K.tolist()
            K, most = len(labels), max(*self.num_nodes, *ALL_SIZES)
            calibration = [ranks[text] for text in replayed.calibration]
            chain = HeadsTree("heads, chain", Growth.chain(K), ranks)
            joint = HeadsTree("heads, tree", grow(calibration, most, self.max_width), ranks)
            rows += [replayed.row(chain, n) for n in range(2, K + 2)]
            rows += [replayed.row(joint, n) for n in self.num_nodes]
            product = product_growth(ranks, replayed.calibration, most, self.max_width)
            stops = grow_where_walks_stop(calibration, most, self.max_width)
            for chosen, growth in (("joint", joint.growth), ("stops", stops), ("product", product)):
                trees += tree_sizes(chosen, growth, ranks, replayed)
        return Evaluation(len(replayed.heldout), int(replayed.loops_I.sum()), rows, accuracy_KR, labels, trees)
