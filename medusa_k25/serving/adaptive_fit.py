"""What an `Adaptive` is fitted on, and what it is worth before anybody serves it: replay, with a clock.

A verify pass of a part accepts what the whole tree would, up to where the part ends. So one drafting at every state of
the cached answers, and the ranks that replay has anyway, decide what every choice of parts would have emitted; a cycle
of the cost model is added up for each. Everything is chosen on calibration text and reported on held-out text.

Requests side by side: each of B places of a server serves all answers, every place in another order, so that it is
always B of them that share one choice, and every policy has the same tokens to emit.

Letters: N states of all answers, S sizes of a part, K heads, n tree nodes, B requests at a time, I answers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from medusa_k25.adaptive import Adaptive, log_odds
from medusa_k25.cache import Cache, Document
from medusa_k25.costs.cycle import CycleModel
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import Heads
from medusa_k25.serving.decode import Drafter
from medusa_k25.tree import Growth, Tree, places

PART_SIZES = (1, 2, 4, 8, 16, 32, 64)  # of which those up to the tree's are tried, and the tree's own
BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPORTED_BATCHES = (1, 8, 32)
# From so many times the tokens a second without drafting on it is drafted, on text that the rule was not fitted on.
PAYS_FROM = 1.02
PACES, PACE_EXACT = 5, 1e-3  # replays at most until the pace changes by no more than such a share
PRICED_TOKENS = 10_000  # of calibration and of held-out text that are replayed; every place of a batch walks all
LOGITS = 1 << 24  # at a time, while all states are drafted from
RIDGE = 1.0  # pseudo-observations that hold a calibration to the heads' own probabilities


@torch.no_grad()
def answer_log_p(drafter: Drafter, cache: Cache, documents: Iterable[Document]) -> list[Tensor]:
    """For every answer in `documents` what `Drafter.draft_all` says of its drafts at each of its states, [S, n]."""
    widest = max((len(level.nodes_P) for level in drafter.levels), default=1)
    rows = max(1, LOGITS // (widest * len(drafter.speculator.vocabulary)))
    return [
        torch.cat(
            [
                drafter.draft_all(*each)[1].cpu()
                for each in zip(hidden_SD.split(rows), future_SK[:, 0].split(rows), strict=True)
            ]
        )
        for document in documents
        for hidden_SD, future_SK in answers_of(cache, document, drafter.speculator.heads.num_heads)
    ]


def right_drafts(tree: Tree, ranks_NK: Tensor) -> Tensor:
    """bool [N, n]: whether a node's draft and all above it are what the text goes on with. The root always is."""
    right_Nn = torch.zeros(len(ranks_NK), tree.num_nodes + 1, dtype=torch.bool)
    right_Nn.scatter_(1, places(tree.paths, ranks_NK) + 1, True)
    right_Nn[:, 0] = True
    return right_Nn[:, : tree.num_nodes]  # behind it: heads whose label is no draft


def calibrated(tree: Tree, log_p_Nn: Tensor, ranks_NK: Tensor) -> tuple[tuple[float, float], ...]:
    """`Adaptive.calibration`, by logistic regression on all drafts whose parent is right.

    A draft beyond the answer's end emits nothing, and counts as wrong.
    """
    right_Nn, odds_Nn = right_drafts(tree, ranks_NK), log_odds(log_p_Nn)
    found = []
    for depth in range(1, tree.depth + 1):
        nodes = (tree.depths_n == depth).nonzero().flatten()
        counted_NC = right_Nn[:, [tree.parents[node] for node in nodes]]
        found.append(_logistic(odds_Nn[:, nodes][counted_NC].double(), right_Nn[:, nodes][counted_NC].double()))
    return tuple(found)


def _logistic(odds_M: Tensor, right_M: Tensor) -> tuple[float, float]:
    """(slope, offset) most likely for what was right at these log-odds; near (1, 0) where little is known."""
    own = torch.tensor([1.0, 0.0], dtype=torch.float64)
    fitted = own.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([fitted], max_iter=100, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        nats = binary_cross_entropy_with_logits(fitted[0] * odds_M + fitted[1], right_M, reduction="sum")
        total = (nats + RIDGE / 2 * (fitted - own).square().sum()) / max(len(odds_M), 1)
        total.backward()
        return total

    optimizer.step(loss)
    slope, offset = fitted.tolist()
    return slope, offset


@dataclass(frozen=True)
class Costs:
    """cost_ms and plain_ms of `Adaptive`, for its batches and sizes."""

    batches: tuple[int, ...]
    sizes: tuple[int, ...]
    cost_ms: tuple[tuple[float, ...], ...]
    plain_ms: tuple[float, ...]

    @classmethod
    def of(
        cls,
        passes: CycleModel,
        heads: Heads,
        draft_vocab_size: int,
        num_nodes: int,
        context: int | None = None,
        temperature: float = 0.0,
    ) -> "Costs":
        """Of parts of a tree of `num_nodes`, all of which is drafted whatever is verified. context: None: the usual."""
        context = passes.usual_context if context is None else context
        sizes = tuple(sorted({*(size for size in PART_SIZES if size < num_nodes), num_nodes}))

        def draft_ms(nodes: int, batch: int) -> float:
            return passes.drafting(heads, draft_vocab_size, nodes, batch).ms if nodes > 1 else 0.0

        def cost_ms(size: int, batch: int) -> float:
            whole, own = draft_ms(num_nodes, batch), draft_ms(size, batch)
            if size == 1:
                return plain_ms(batch) + whole
            # a measured pass has the drafting of its own nodes inside
            return passes.cycle(size, batch, context, temperature, own).ms + whole - own

        def plain_ms(batch: int) -> float:
            return 1000 / passes.baseline_tok_s(batch, context, temperature)

        rows = tuple(tuple(cost_ms(size, batch) for size in sizes) for batch in BATCHES)
        return cls(BATCHES, sizes, rows, tuple(plain_ms(batch) for batch in BATCHES))


@dataclass(frozen=True, eq=False)
class Walkable:
    """Text by what each part should emit and does emit at every state, float64 and int64 [N, S]; I answers' states."""

    expected_NS: "np.ndarray[tuple[int, int], np.dtype[np.float64]]"
    emitted_NS: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    lengths_I: tuple[int, ...]

    @classmethod
    def of(cls, rule: Adaptive, tree: Tree, log_p: Sequence[Tensor], ranks: Sequence[Tensor]) -> "Walkable":
        """log_p: `answer_log_p`; ranks: `replay.answer_ranks` of the same answers."""
        lengths = [len(ranks_SK) for ranks_SK in ranks]
        left_N = torch.cat([torch.arange(length, 0, -1) for length in lengths])
        right_Nn = right_drafts(tree, torch.cat(list(ranks)))
        emitted_NS = torch.stack([right_Nn[:, rule.nodes(size)].sum(dim=1).minimum(left_N) for size in rule.sizes], 1)
        expected_NS = rule.expected(torch.cat(list(log_p)), tree).double()
        return cls(expected_NS.numpy(), emitted_NS.numpy(), tuple(lengths))

    @property
    def num_states(self) -> int:
        return len(self.emitted_NS)


@dataclass(frozen=True)
class Clocked:
    """Replayed with a clock. tok_s: of one request; plain_share: of the cycles; nodes: verified a cycle, on average."""

    tok_s: float
    plain_share: float
    nodes: float


Choice = Callable[[Sequence[float], int], int]  # (expected tokens by size, summed over the batch; requests) -> size


def clocked(text: Walkable, rule: Adaptive, batch: int, choice: Choice | None = None) -> Clocked:
    """All answers of `text` at each of `batch` places. choice: None is the rule's own."""
    choice = rule.best if choice is None else choice
    column = {size: s for s, size in enumerate(rule.sizes)}
    # a place that has served an answer goes on with the next one of its own order
    starts = np.cumsum([0, *text.lengths_I])
    generator = torch.Generator().manual_seed(0)
    states_BN = np.stack(
        [
            np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order.tolist()])
            for order in (torch.randperm(len(text.lengths_I), generator=generator) for _ in range(batch))
        ]
    )
    at_B, costs = np.zeros(batch, dtype=np.int64), dict[int, list[float]]()
    request_ms = 0.0
    cycles = np.zeros(len(rule.sizes), dtype=np.int64)
    while len(places_B := np.flatnonzero(at_B < text.num_states)):
        states_B = states_BN[places_B, at_B[places_B]]
        requests = len(places_B)
        s = column[choice(text.expected_NS[states_B].sum(axis=0).tolist(), requests)]
        at_B[places_B] += text.emitted_NS[states_B, s]
        request_ms += requests * costs.setdefault(requests, rule.costs(requests))[s]
        cycles[s] += 1
    shares = cycles / cycles.sum()
    return Clocked(1000 * batch * text.num_states / request_ms, float(shares[0]), float(shares @ np.array(rule.sizes)))


def fitted(tree: Tree, log_p: Sequence[Tensor], ranks: Sequence[Tensor], costs: Costs) -> Adaptive:
    """All on calibration text, given by `answer_log_p` and `replay.answer_ranks`. costs: of parts of this tree.

    Up to which batch it pays is asked of rules that are fitted on every other answer, and clocked on those between.
    """
    rule, halves = _rule(tree, log_p, ranks, costs), ((0, 1), (1, 0)) if len(ranks) > 1 else ((0, 0),)
    crossed = []
    for own, other in halves:
        half = _rule(tree, log_p[own::2], ranks[own::2], costs)
        crossed.append((half, Walkable.of(half, tree, log_p[other::2], ranks[other::2])))
    for batch, plain_ms in zip(costs.batches, costs.plain_ms, strict=True):
        speeds = [clocked(text, half, batch).tok_s / 1000 for half, text in crossed]
        if sum(speeds) / len(speeds) * plain_ms < PAYS_FROM:
            break  # nor with more requests
        rule = replace(rule, draft_up_to=batch)
    return rule


def _rule(tree: Tree, log_p: Sequence[Tensor], ranks: Sequence[Tensor], costs: Costs) -> Adaptive:
    """The pace of each batch is the one that its own rule reaches: from that of plain steps on, replay after replay."""
    ranks_NK = torch.cat(list(ranks))
    number = {path: node for node, path in enumerate(tree.paths, start=1)}
    rule = Adaptive(
        tuple(number[path] for path in Growth.of_tree(tree, ranks_NK).paths),
        costs.sizes,
        calibrated(tree, torch.cat(list(log_p)), ranks_NK),
        costs.batches,
        costs.cost_ms,
        costs.plain_ms,
        pace=tuple(1 / ms for ms in costs.plain_ms),
        draft_up_to=0,
    )
    text = Walkable.of(rule, tree, log_p, ranks)
    for row, batch in enumerate(costs.batches):
        for _ in range(PACES):
            before = rule.pace[row]
            reached = clocked(text, rule, batch).tok_s / 1000
            rule = replace(rule, pace=(*rule.pace[:row], reached, *rule.pace[row + 1 :]))
            if abs(reached / before - 1) <= PACE_EXACT:
                break
    return rule


@dataclass(frozen=True)
class PricedBatch:
    """Tokens a second of one request on held-out text. always: the whole tree every cycle; adaptive: None where the
    rule does not draft, and so is as fast as none."""

    batch: int
    none_tok_s: float
    always: Clocked
    adaptive: Clocked | None


@dataclass(frozen=True)
class Priced:
    """What a rule is worth. of_target: whether the passes are those of the target whose text this is."""

    rule: Adaptive
    rows: tuple[PricedBatch, ...]
    of_target: bool

    @classmethod
    def of(
        cls, rule: Adaptive, tree: Tree, log_p: Sequence[Tensor], ranks: Sequence[Tensor], of_target: bool
    ) -> "Priced":
        """On held-out text."""
        text, rows = Walkable.of(rule, tree, log_p, ranks), []
        for batch in REPORTED_BATCHES:
            none_tok_s = 1000 / rule.plain_ms[rule.batches.index(batch)]
            always = clocked(text, rule, batch, lambda tokens_S, requests: rule.sizes[-1])
            adaptive = clocked(text, rule, batch) if batch <= rule.draft_up_to else None
            rows.append(PricedBatch(batch, none_tok_s, always, adaptive))
        return cls(rule, tuple(rows), of_target)

    @property
    def said(self) -> str:
        """What the table is of."""
        rehearsal = "" if self.of_target else ", a rehearsal with another target's passes"
        most = self.rule.draft_up_to
        pays = f"pays for at most {most} request{'' if most == 1 else 's'} at a time" if most else "never pays"
        return (
            f"adaptive: in every cycle as many of {self.rule.sizes[-1]} nodes are verified as the heads are sure of"
            f"{rehearsal}; tokens/s of one request on held-out text; by calibration text drafting {pays}"
        )

    def text(self) -> str:
        head = "batch     none  always on             adaptive              plain steps  nodes a cycle"
        lines = [*self.said.split("; "), head]
        for row in self.rows:
            adaptive = "does not draft"
            if row.adaptive is not None:
                adaptive = (
                    f"{_against(row.adaptive, row.none_tok_s):<20}  {row.adaptive.plain_share:11.0%}  "
                    f"{row.adaptive.nodes:13.2f}"
                )
            lines.append(
                f"{row.batch:5}  {row.none_tok_s:7.1f}  {_against(row.always, row.none_tok_s):<20}  {adaptive}"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {"said": self.said, "rule": self.rule.as_json(), "rows": [asdict(row) for row in self.rows]}


def _against(clocked: Clocked, none_tok_s: float) -> str:
    return f"{clocked.tok_s:7.1f} ({clocked.tok_s / none_tok_s:.2f}x)"


def adaptive_note(rule: Adaptive, machine: str) -> str:
    """A sentence for the export's user."""
    if rule.draft_up_to == 0:
        return (
            f"By calibration text and what passes cost on {machine}, for which this was exported, drafting never pays: "
            "an adaptive server does not draft"
        )
    *some, whole = map(str, rule.sizes)
    return (
        f"An adaptive server verifies {', '.join(some)} or {whole} nodes a cycle, as sure as the heads are, and drafts "
        f"for at most {rule.draft_up_to} request{'' if rule.draft_up_to == 1 else 's'} at a time, as pays on "
        f"calibration text with what passes cost on {machine}"
    )
