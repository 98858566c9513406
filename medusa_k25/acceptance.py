"""What every predictor accepts on held-out text: the table that `evaluate` prints.

Letters: S states of one answer, N of all, K heads, R choices of a head.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isnan
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from medusa_k25.cache import Cache, Document
from medusa_k25.data.splits import Split
from medusa_k25.data.texts import Text
from medusa_k25.data.windows import documents_of
from medusa_k25.heads import Speculator
from medusa_k25.metrics import top_accuracy
from medusa_k25.ngram.beside import LONGEST, MOST_CHAIN, SHORTEST, accepted_beside, looked_up
from medusa_k25.ngram.corpus import best_corpus_drafts, choose_corpus
from medusa_k25.ngram.engine import Corpus, EngineNgram
from medusa_k25.ngram.lookup import Lookup
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.replay import (
    Acceptance,
    Passes,
    Resampling,
    answer_ranks,
    grow,
    grow_where_walks_stop,
    lengths_by_size,
    walk_all,
)
from medusa_k25.tree import Growth, Tree, places

NGRAM_LOOKUP, CORPUS = "n-gram lookup", "training answers + own text"
CHAIN, TREE = "heads, chain", "heads, tree"
BOTH, BOTH_ANSWERS = "heads + n-gram lookup", "heads + lookup + training answers"
HEADS = (CHAIN, TREE, BOTH, BOTH_ANSWERS)

ALL_SIZES = range(2, 65)  # of trees, in tree_sizes
SHARING_TOKENS = 30_000  # of calibration text, on which it is tried how to share drafts between a corpus and own text


class Predictor(Protocol):
    @property
    def name(self) -> str: ...

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        """For each text int64 [S]: drafts that a pass of `num_nodes` tokens, root included, accepts from each state."""
        ...


@dataclass(frozen=True)
class CorpusAndOwnText:
    """SGLang's NGRAM with a corpus, the drafts shared out between it and the own text as is best on `calibration`."""

    name: str
    corpus: Corpus
    calibration: Sequence[Text]
    _drafts: dict[int, int] = field(default_factory=dict, repr=False)

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        return EngineNgram(self.name, self.corpus, self.corpus_drafts(num_nodes)).accepted(texts, num_nodes)

    def corpus_drafts(self, num_nodes: int) -> int:
        """How many of a pass's drafts the corpus has the choosing of: --speculative-ngram-external-sam-budget."""
        if num_nodes not in self._drafts:
            self._drafts[num_nodes] = best_corpus_drafts(self.corpus, self.calibration, num_nodes)
        return self._drafts[num_nodes]


def training_free(corpus: Sequence[Text], calibration: Sequence[Text], ngram_longest: int) -> list[Predictor]:
    """All predictors that need nothing but text; those with a corpus where there is one."""
    predictors: list[Predictor] = [Lookup(NGRAM_LOOKUP, ngram_longest), Lookup("suffix lookup", None)]
    predictors.append(EngineNgram("SGLang's NGRAM", None, 0))
    if corpus:
        answers = Corpus([text.answer_T for text in corpus])
        both = CorpusAndOwnText(CORPUS, answers, some_of(calibration, SHARING_TOKENS))
        predictors += [EngineNgram("training answers", answers), both]
    return predictors


@dataclass(frozen=True)
class HeadsTree:
    """Heads in the tree of each size that `growth` gives. ranks: of a text's labels, int64 [S, K] (`answer_ranks`)."""

    name: str
    growth: Growth
    ranks: Mapping[Text, Tensor]
    _places: dict[Text, Tensor] = field(default_factory=dict, repr=False)  # in the paths of all sizes

    def tree(self, num_nodes: int) -> Tree:
        return self.growth.tree(num_nodes)

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        states = [text.num_states for text in texts]
        if not self._places.keys() >= {*texts}:
            found = places(self.growth.paths, torch.cat([self.ranks[text] for text in texts]))
            self._places.update(zip(texts, found.int().split(states), strict=True))
        places_NK = torch.cat([self._places[text] for text in texts])
        return list((places_NK < num_nodes - 1).sum(dim=1).split(states))  # the first paths are the tree of that size


@dataclass(frozen=True)
class Share:
    """How a pass is split where something was looked up with success: `chain` nodes for what followed there, the rest
    for the heads' tree. shortest: tokens that must have matched; elsewhere the tree has all nodes."""

    chain: int
    shortest: int


@dataclass(frozen=True)
class HeadsBesideLookup:
    """Heads, and beside their tree what followed a match; a pass verifies `num_nodes` tokens with or without.

    looked_up: of every text, see `ngram.beside.looked_up`, for at least the heads and MOST_CHAIN tokens. How a pass is
    split is chosen on `calibration` for each size, no chain included.
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
            chains = range(1, min(MOST_CHAIN, num_nodes - 1) + 1)
            lengths = range(SHORTEST, LONGEST + 1)
            shares = [Share(0, SHORTEST), *(Share(chain, shortest) for chain in chains for shortest in lengths)]

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
            accepted_beside(whole_S, smaller_S, *self.looked_up[text], share.chain, share.shortest)
            for whole_S, smaller_S, text in zip(whole, smaller, texts, strict=True)
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
            "without_loops_interval": [known(value) for value in self.without_loops_interval],
            "every": _as_json(self.every),
            "without_loops": _as_json(self.without_loops),
            "calibration": _as_json(self.calibration),
        }


def _as_json(acceptance: Acceptance) -> dict[str, Any]:
    shares = {"length": known(acceptance.length), "passes_saved": known(acceptance.passes_saved)}
    return asdict(acceptance) | shares


def known(value: float) -> float | None:
    """None for nan, which JSON does not have: of text that all ends in loops nothing is left without them."""
    return None if isnan(value) else value


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
    topics: int  # that the held-out text has; 0 where it names none. Intervals are for text of these
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
            "topics": self.topics,
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


def by_text(
    read: Callable[[Sequence[Document]], Sequence[Tensor]], cache: Cache, texts: Mapping[Split, Sequence[Text]]
) -> dict[Text, Tensor]:
    """What `read` finds for every answer, by text. texts: of `texts_of_cache`, in its order; of each conversation all
    or none."""
    found: dict[Text, Tensor] = {}
    for split, some in texts.items():
        wanted = {text.document for text in some}
        documents = [document for document in documents_of(cache, split) if document.id in wanted]
        found |= zip(some, read(documents), strict=True)
    return found


def ranks_of(speculator: Speculator, cache: Cache, texts: Mapping[Split, Sequence[Text]]) -> dict[Text, Tensor]:
    """`answer_ranks` of every text, see `by_text`."""
    return by_text(lambda documents: answer_ranks(speculator, cache, documents), cache, texts)


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
    possible = [n for n in sizes if n <= growth.most_nodes]
    calibration, heldout = (
        lengths_by_size(growth, [ranks[text] for text in texts], possible)
        for texts in (replayed.calibration, replayed.heldout)
    )
    trees = {n: growth.tree(n) for n in possible}
    return [TreeSize(chosen, n, trees[n].depth, trees[n].width, calibration[n], heldout[n]) for n in possible]


def some_of(texts: Sequence[Text], most_tokens: int | None) -> list[Text]:
    """At most so many tokens of answers (None: all): whole conversations, one at least, by a hash of their ids."""
    if most_tokens is None or sum(text.num_states for text in texts) <= most_tokens:
        return list(texts)
    tokens_of = Counter[str]()
    for text in texts:
        tokens_of[text.document] += text.num_states
    kept, tokens = set[str](), 0
    for document in sorted(tokens_of, key=lambda id: hashlib.sha256(id.encode()).digest()):
        tokens += tokens_of[document]
        if kept and tokens > most_tokens:
            break
        kept.add(document)
    return [text for text in texts if text.document in kept]


@dataclass(frozen=True)
class Drawn:
    """A tree of heads, and the share of the held-out verify passes that accepted the draft at each of its paths."""

    paths: list[list[int]]
    shares: list[float]


def drawn(tree: Tree, passes: Passes, texts: Sequence[Text], ranks: Mapping[Text, Tensor]) -> Drawn:
    """passes: of `walk_all` over `texts`, with this tree."""
    start_I = torch.tensor([0, *(text.num_states for text in texts)]).cumsum(0)
    ranks_NK = torch.cat([ranks[text] for text in texts])
    places_PK = places(tree.paths, ranks_NK[start_I[passes.text_P] + passes.state_P])
    counts = torch.bincount(places_PK.flatten(), minlength=len(tree.paths) + 1)[: len(tree.paths)]
    return Drawn([list(path) for path in tree.paths], (counts / len(places_PK)).tolist())


class Evaluator:
    """What is replayed, and for which kind of request it is judged.

    num_nodes: sizes of a pass, root included; null is left out. max_width: choices of a head that a tree uses at most.
    ngram_longest: tokens that n-gram lookup looks up at most. corpus_tokens: of a corpus, see `choose_corpus`.
    most_tokens: of calibration and of held-out text that is walked, whole conversations; null: all.
    batch, context: requests at a time, and tokens before each; null: as many as the machine was measured with.
    temperature: that they are served at; null: the text's. judged_nodes: size that is judged; null: the fastest.
    """

    def __init__(
        self,
        num_nodes: Sequence[int | None],
        max_width: int,
        ngram_longest: int,
        corpus_tokens: int,
        most_tokens: int | None,
        batch: int,
        context: int | None,
        temperature: float | None,
        judged_nodes: int | None = None,
    ):
        sizes = sorted({nodes for nodes in num_nodes if nodes is not None})
        if not sizes or not all(isinstance(nodes, int) and nodes in ALL_SIZES for nodes in sizes):
            raise ValueError(
                f"evaluate.num_nodes and num_nodes={sizes}: a pass verifies 2 to {ALL_SIZES[-1]} tokens, root included"
            )
        for name, value in (("batch", batch), ("context", context)):
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"evaluate.{name}={value}: expected a whole number, at least 1")
        if temperature is not None and not (isinstance(temperature, int | float) and 0 <= temperature < float("inf")):
            raise ValueError(f"evaluate.temperature={temperature}: expected a number, 0 or more; null: the text's")
        self.num_nodes, self.max_width, self.ngram_longest = sizes, max_width, ngram_longest
        self.corpus_tokens, self.most_tokens = corpus_tokens, most_tokens
        self.batch, self.context, self.temperature = batch, context, temperature
        self.judged_nodes = judged_nodes

    def replayed(self, texts: Mapping[Split, Sequence[Text]]) -> Replayed:
        """The text that is walked; ValueError where there is none."""
        return Replayed(*(some_of(texts[split], self.most_tokens) for split in ("heldout", "calibration")))

    def predictors(
        self, train: Sequence[Text], replayed: Replayed, ranks: Mapping[Text, Tensor] | None = None
    ) -> list[Predictor]:
        """All there are. ranks: of the heads' labels in the replayed text, None without heads."""
        corpus = choose_corpus(train, replayed.calibration, self.corpus_tokens) if train else []
        predictors = training_free(corpus, replayed.calibration, self.ngram_longest)
        if ranks is not None:
            calibration = [ranks[text] for text in replayed.calibration]
            chain = HeadsTree(CHAIN, Growth.chain(calibration[0].shape[1]), ranks)
            tree = HeadsTree(TREE, grow(calibration, ALL_SIZES[-1], self.max_width), ranks)
            predictors += [chain, tree]
            texts, reach = [*replayed.calibration, *replayed.heldout], calibration[0].shape[1] + MOST_CHAIN
            tables: dict[str, AnswersTable | None] = {BOTH: None}
            if corpus:
                tables[BOTH_ANSWERS] = AnswersTable.build([text.answer_T for text in corpus], reach)
            for name, table in tables.items():
                found = dict(zip(texts, looked_up(texts, table, reach), strict=True))
                predictors.append(HeadsBesideLookup(name, tree, found, replayed.calibration))
        return predictors

    def sizes(self, predictor: Predictor) -> Sequence[int]:
        """Those of `num_nodes` that it can fill: a tree of heads has no more nodes than calibration text has paths.

        ValueError where it can fill none.
        """
        heads = predictor.heads if isinstance(predictor, HeadsBesideLookup) else predictor
        if not isinstance(heads, HeadsTree):
            return self.num_nodes
        if heads.name == CHAIN:
            return range(2, heads.growth.most_nodes + 1)
        sizes = [n for n in self.num_nodes if n <= heads.growth.most_nodes]
        if not sizes:
            heads.growth.tree(self.num_nodes[0])  # says how many there are
        return sizes

    def judged(self, rows: Sequence[Row]) -> list[Row]:
        """Those among which the fastest is looked for: of `judged_nodes`, where a predictor has that size."""
        of_size = {row.predictor for row in rows if row.num_nodes == self.judged_nodes}
        return [row for row in rows if row.predictor not in of_size or row.num_nodes == self.judged_nodes]

    def run(
        self, replayed: Replayed, predictors: Sequence[Predictor], ranks: Mapping[Text, Tensor] | None = None
    ) -> Evaluation:
        """Everything is chosen on calibration text and reported on held-out text."""
        # the largest first: what was found in a corpus serves all smaller ones
        work = [(predictor, n) for predictor in predictors for n in reversed(self.sizes(predictor))]
        rows = [replayed.row(predictor, n) for predictor, n in tqdm(work, desc="replay", unit="row", leave=False)]
        order = [predictor.name for predictor in predictors]
        rows.sort(key=lambda row: (order.index(row.predictor), row.num_nodes))
        accuracy_KR: list[list[float]] = []
        labels: list[int] = []
        trees: list[TreeSize] = []
        if ranks is not None:
            hits_KR, labels_K = accuracy(ranks, replayed.heldout, range(1, 6))
            accuracy_KR, labels = (hits_KR / labels_K[:, None].clamp(min=1)).tolist(), labels_K.tolist()
            calibration = [ranks[text] for text in replayed.calibration]
            most = ALL_SIZES[-1]
            joint = next(each.growth for each in predictors if isinstance(each, HeadsTree) and each.name == TREE)
            for chosen, growth in (
                ("joint", joint),
                ("stops", grow_where_walks_stop(calibration, most, self.max_width)),
                ("product", product_growth(ranks, replayed.calibration, most, self.max_width)),
            ):
                trees += tree_sizes(chosen, growth, ranks, replayed)
        loops, topics = int(replayed.loops_I.sum()), len({text.group for text in replayed.heldout} - {None})
        return Evaluation(len(replayed.heldout), loops, topics, rows, accuracy_KR, labels, trees)
