"""Acceptance without a server: walk the target's own text as a draft-and-verify server would.

On text that the target generated itself, what a verify pass accepts is already decided: drafts are accepted as long as
they equal the text. So the number of passes is known to the integer. tests/test_decode.py and the `decode` verb hold
this against a real draft-and-verify loop.

The words: a pass verifies a tree below the root, the token that the target produced last. It emits the accepted drafts
and one token of the target's own. Acceptance length = tokens emitted by passes / passes; the token that prefill emits
is not counted, and drafts beyond the answer's end do not count.

Text that was sampled at a temperature is walked the same way. A verify pass that samples keeps a draft if it equals the
token that the target samples there (SGLang's rule for a static draft, too: kept with the probability p(draft)), and the
text holds such a sample. So the share of positions where a draft equals the text is an unbiased estimate of its
acceptance at that temperature and top-p, and at no other: in greedy text the token is always the likeliest one, which
flatters every draft that often is. A verdict says where the two differ.

Letters: S states of one answer, N of all, K heads, D hidden, M draft vocabulary, I texts, P passes, C documents,
B resamples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medusa_k25.cache import Cache, Document
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import Speculator
from medusa_k25.metrics import label_ranks
from medusa_k25.tree import Growth, Path, Tree, places

NO_CALIBRATION = "there is no answer in the calibration split to choose a tree on; capture more conversations"


@dataclass(frozen=True)
class Acceptance:
    """Counters of verify passes over answers that needed any. `accepted[a]` = passes that accepted exactly a drafts."""

    answers: int = 0
    passes: int = 0
    emitted: int = 0
    accepted: dict[int, int] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Tokens emitted a pass (1 when nothing was ever accepted); nan without passes."""
        return self.emitted / self.passes if self.passes else float("nan")

    @property
    def passes_saved(self) -> float:
        """Share of the target's decode passes that speculation saves."""
        return 1 - self.passes / self.emitted if self.emitted else float("nan")

    def __add__(self, other: "Acceptance") -> "Acceptance":
        accepted = {
            a: self.accepted.get(a, 0) + other.accepted.get(a, 0) for a in sorted({*self.accepted, *other.accepted})
        }
        return Acceptance(
            self.answers + other.answers, self.passes + other.passes, self.emitted + other.emitted, accepted
        )


def walk(accepted_S: Sequence[int]) -> Acceptance:
    """One answer, from prefill to its last token: the plain loop that `walk_all` is held against.

    `accepted_S[s]` = drafts that a pass accepts when it was drafted from the answer's state s. An answer of A tokens
    has S = A - 1 such states: state 0 is the last prompt token's, whose root is answer token 0; state s has root
    answer token s, and S - s tokens follow that root.
    """
    state, passes, emitted = 0, 0, 0
    histogram: dict[int, int] = {}
    while state < len(accepted_S):
        left = len(accepted_S) - state
        accepted = min(accepted_S[state], left)
        step = min(accepted + 1, left)  # a draft that is the answer's last token leaves no place for the target's own
        state, passes, emitted = state + step, passes + 1, emitted + step
        histogram[accepted] = histogram.get(accepted, 0) + 1
    return Acceptance(int(passes > 0), passes, emitted, histogram)


@dataclass(frozen=True, eq=False)
class Passes:
    """The verify passes of all texts, one after the other. int64 [P] each: the text a pass belongs to, the state it
    drafted from, the drafts it accepted (within the text) and the tokens it emitted."""

    num_texts: int
    text_P: Tensor
    state_P: Tensor
    accepted_P: Tensor
    emitted_P: Tensor

    def where(self, kept_P: Tensor) -> "Passes":
        """Those passes alone. kept_P: bool [P]."""
        return Passes(
            self.num_texts, self.text_P[kept_P], self.state_P[kept_P], self.accepted_P[kept_P], self.emitted_P[kept_P]
        )

    @property
    def acceptance(self) -> Acceptance:
        counts = torch.bincount(self.accepted_P).tolist()
        histogram = {accepted: count for accepted, count in enumerate(counts) if count}
        return Acceptance(len(self.text_P.unique()), len(self.text_P), int(self.emitted_P.sum()), histogram)

    def by_text(self) -> tuple[Tensor, Tensor]:
        """(emitted tokens, passes) of each text, int64 [I] each."""
        emitted_I = torch.zeros(self.num_texts, dtype=torch.long).index_add_(0, self.text_P, self.emitted_P)
        return emitted_I, torch.bincount(self.text_P, minlength=self.num_texts)


def walk_all(accepted: Sequence[Tensor]) -> Passes:
    """`walk` on many texts at once: one tensor a text, int64 [S], as `walk` takes it.

    A pass leads from a state to that behind the tokens it emits, and the last one of a text to the start of the next:
    so the texts make up one chain of states. Only every 16th pass is looked for one by one.
    """
    length_I = torch.tensor([len(accepted_S) for accepted_S in accepted], dtype=torch.long)
    stop_I = length_I.cumsum(0)
    N = int(length_I.sum())
    state_N = torch.arange(N)
    left_N = stop_I.repeat_interleave(length_I) - state_N
    accepted_N = torch.cat([*accepted, torch.empty(0, dtype=torch.long)]).minimum(left_N)
    step_N = (accepted_N + 1).minimum(left_N)
    jumps = [torch.cat([state_N + step_N, torch.tensor([N])])]  # the end leads to itself
    for _ in range(4):
        jumps.append(jumps[-1][jumps[-1]])  # 1, 2, 4, 8 and 16 passes ahead
    far, state, stops = jumps.pop().numpy().data, 0, []
    while state < N:
        stops.append(state)
        state = far[state]
    stop_P = torch.tensor(stops, dtype=torch.long)
    for jump in reversed(jumps):
        stop_P = torch.stack([stop_P, jump[stop_P]], dim=1).flatten()
    stop_P = stop_P[stop_P < N]
    text_P = torch.searchsorted(stop_I, stop_P, right=True)
    return Passes(len(accepted), text_P, stop_P - (stop_I - length_I)[text_P], accepted_N[stop_P], step_N[stop_P])


def replay(ranks: Iterable[Tensor], tree: Tree) -> Acceptance:
    """Acceptance of `tree` over answers that are given by the ranks [S, K] of their labels (see `answer_ranks`)."""
    return walk_all([tree.accepted(ranks_SK) for ranks_SK in ranks]).acceptance


@torch.no_grad()
def answer_ranks(speculator: Speculator, cache: Cache, documents: Iterable[Document]) -> list[Tensor]:
    """For every answer in `documents` the rank of head k's label at each of its states, int64 [S, K].

    The rank is the place of the true token among the head's logits (0 = best), given the true tokens before it: a
    server's walk goes on below a draft only where it is the true token, so no other path matters. MISS stands for a
    label outside the draft vocabulary or beyond the answer's end.
    """
    return [
        future_ranks(speculator, hidden_SD, future_SK)
        for document in documents
        for hidden_SD, future_SK in answers_of(cache, document, speculator.heads.num_heads)
    ]


@torch.no_grad()
def future_ranks(speculator: Speculator, hidden_SD: Tensor, future_SK: Tensor) -> Tensor:
    """Ranks [S, K], on the CPU, of the labels in `future_SK` (see `labels.future_tokens`) at the states hidden_SD."""
    heads = speculator.heads
    future_SK = future_SK.to(speculator.lm_head_MD.device)
    features_KSD = speculator.features(hidden_SD, future_SK[:, :-1])
    labels_KS = speculator.vocabulary.to_draft(future_SK[:, 1:]).T

    def ranks_of(lm_head: Tensor) -> Tensor:
        lm_heads_KMD = lm_head.expand(heads.num_heads, -1, -1)
        return torch.stack([label_ranks(*each) for each in zip(features_KSD, lm_heads_KMD, labels_KS, strict=True)])

    return heads.with_lm_head(speculator.lm_head_MD, ranks_of).T.cpu()


def grow(calibration: Sequence[Tensor], most_nodes: int, max_width: int) -> Growth:
    """`Growth.by_count` on the answers of calibration text, each given by its ranks [S, K] (see `answer_ranks`)."""
    if not calibration:
        raise ValueError(NO_CALIBRATION)
    return Growth.by_count(torch.cat(list(calibration)), most_nodes, max_width)


def lengths_by_size(growth: Growth, ranks: Sequence[Tensor], sizes: Iterable[int]) -> dict[int, float]:
    """Acceptance length, by nodes, of the trees of `growth` on answers given by their ranks [S, K] (`answer_ranks`).

    More nodes than it has paths for stay empty.
    """
    places_NK = places(growth.paths, torch.cat(list(ranks)))
    states = [len(ranks_SK) for ranks_SK in ranks]

    def length(nodes: int) -> float:
        accepted_N = (places_NK < nodes - 1).sum(dim=1)  # the first paths are the tree of that size
        return walk_all(accepted_N.split(states)).acceptance.length

    return {nodes: length(nodes) for nodes in sizes}


def fastest_tree(calibration: Sequence[Tensor], cycle_ms: Mapping[int, float], max_width: int) -> Tree:
    """Of the best trees of all sizes in `cycle_ms` the one with most tokens a second: not the one that accepts most.

    cycle_ms: what a pass takes by its number of nodes, the root included. Calibration text that has not enough paths
    for a size has a smaller tree, with as much in it. Of equals the smallest.
    """
    growth = grow(calibration, max(cycle_ms), max_width)
    lengths = lengths_by_size(growth, calibration, sorted(cycle_ms))
    return growth.tree(min(max(lengths, key=lambda nodes: lengths[nodes] / cycle_ms[nodes]), growth.most_nodes))


def grow_where_walks_stop(calibration: Sequence[Tensor], most_nodes: int, max_width: int) -> Growth:
    """Like `grow`, but each path is counted only where a server that has the tree so far would draft.

    A stretch of text that is easy to predict is full of positions at which deep paths are right, and a server skips
    most of them: counting all positions takes deep paths too early. Path after path the one joins that is right most
    often where the walk of the tree before it stops; its share is of those positions, and the shares need not fall. No
    tree is proven best this way: where a walk stops depends on the tree. notes/LOG.md says what it was worth.
    """
    if not calibration:
        raise ValueError(NO_CALIBRATION)
    ranks_NK = torch.cat(list(calibration))
    lengths = [len(ranks_SK) for ranks_SK in calibration]
    start_I = torch.tensor([0, *lengths]).cumsum(0)
    paths: list[Path] = []
    shares: list[float] = []
    while len(paths) < most_nodes - 1:
        passes = walk_all(Tree(paths).accepted(ranks_NK).split(lengths))
        stops_P = start_I[passes.text_P] + passes.state_P
        counted = Growth.by_count(ranks_NK[stops_P], len(paths) + 2, max_width)  # one more than there are already
        new = [(path, share) for path, share in zip(counted.paths, counted.shares, strict=True) if path not in paths]
        if not new:
            break
        paths.append(new[0][0])  # its parent comes before it, so it is there
        shares.append(new[0][1])
    return Growth(tuple(paths), tuple(shares))


class Resampling:
    """Bootstrap draws of whole documents, with replacement: the answers of one are drawn together.

    The same draws serve every predictor, so that their lengths can be compared draw by draw. Deterministic.
    documents: which one each text belongs to, I names.
    """

    def __init__(self, documents: Sequence[str], samples: int = 1000, seed: int = 0):
        number = {name: i for i, name in enumerate(dict.fromkeys(documents))}
        self.document_I = torch.tensor([number[name] for name in documents], dtype=torch.long)
        self.num_documents = C = len(number)
        generator = torch.Generator().manual_seed(seed)
        drawn_BC = torch.randint(max(C, 1), (samples, C), generator=generator)
        in_rows_BC = drawn_BC + C * torch.arange(samples)[:, None]
        self.times_BC = torch.bincount(in_rows_BC.flatten(), minlength=samples * C).view(samples, C).float()

    def lengths(self, passes: Passes) -> Tensor:
        """Acceptance length in each draw, float32 [B]; nan where a draw holds none of these passes."""
        return self.lengths_by_text(*passes.by_text())

    def lengths_by_text(self, emitted_I: Tensor, passes_I: Tensor) -> Tensor:
        """The same of counts: the tokens and passes of each text, 0 for those that are left out."""
        counts_C2 = torch.zeros(self.num_documents, 2)
        counts_C2.index_add_(0, self.document_I, torch.stack([emitted_I, passes_I], dim=1).float())
        emitted_B, passes_B = (self.times_BC @ counts_C2).unbind(dim=1)
        return emitted_B / passes_B

    def interval(self, passes: Passes, num_nodes: int) -> tuple[float, float]:
        """95% interval of the acceptance length. One document says nothing about others: from 1 to `num_nodes`."""
        if self.num_documents < 2:
            return 1.0, float(num_nodes)
        return between(self.lengths(passes))


def between(values_B: Tensor) -> tuple[float, float]:
    """The middle 95% of values by draw: of lengths, or of the difference or ratio of two predictors' lengths."""
    low, high = values_B.nanquantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
