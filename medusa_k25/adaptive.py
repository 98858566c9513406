"""How much of a drafted tree a cycle verifies: nothing (a plain step), a part of it, or all.

Heads know how sure they are. A cycle that drafts knows the softmax probability of every draft, and a calibration, two
numbers a depth, makes of it how often such a draft is right. So the tokens that a cycle should emit are known for every
part of the tree before any of it is verified, and what a part costs is known, too. The part is chosen that gives most
beyond what its time gives on average:

    choose = argmax over s of   sum over the batch of expected tokens(s)  -  N x pace x cost(s)

Tokens per ms would be another rule, and is a worse one: where the drafts are sure it stops at a small part, whose ratio
is best, and starts the next cycle at a place that is no better than others; where they are not, it verifies drafts
that are better than a plain step's ratio and worse than the average. With the pace that the rule itself reaches, no
other choice from the same expectations is faster in the long run (Dinkelbach's theorem; where a cycle stops is taken
to say nothing of how predictable the text there is). What is fitted and priced, and how, is in serving/adaptive_fit.py.

Parts are static: nested, closed under parents, the same for all requests of a batch, so that a server needs one graph
for each size. Torch and the standard library only: a server imports this.

Letters: N requests, n tree nodes, S sizes of a part.
"""

import reprlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from medusa_k25.tree import Tree

MOST_SIZES, MOST_BATCHES, LARGEST_BATCH = 8, 64, 1 << 16  # a server keeps graphs for each size
LARGEST_NUMBER = 1e9  # of ms; far above any pass, and no sum of such ends in infinity
SURE = 15.0  # log-odds beyond which a float32 probability tells nothing more


@dataclass(frozen=True)
class Adaptive:
    """Which part of a drafted tree a cycle verifies; in an export's config.json it is `medusa_adaptive`.

    order: the tree's nodes but the root, by number, parents first: the first s - 1 of them and the root are the part
    of s nodes. sizes: of the parts that may be verified, ascending; 1 is a plain step, the last one the whole tree.
    calibration: (slope, offset) of each depth: P(draft right | its parent right) = sigmoid(slope x logit(p) + offset),
    p the head's softmax probability over the draft vocabulary.
    batches: ascending numbers of requests, of the rows that follow. cost_ms: [batch][size], a cycle that drafts the
    whole tree and verifies that part; drafting is in the column of size 1, too. plain_ms: [batch], a step without
    drafting. pace: [batch], tokens that a request gains a ms with this rule, on calibration text.
    draft_up_to: the largest batch at which all this pays on calibration text; above it the heads are not to be run at
    all. 0: never.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    calibration: tuple[tuple[float, float], ...]
    batches: tuple[int, ...]
    cost_ms: tuple[tuple[float, ...], ...]
    plain_ms: tuple[float, ...]
    pace: tuple[float, ...]
    draft_up_to: int

    def nodes(self, size: int) -> list[int]:
        """The nodes of the part of so many, ascending, the root first: as a tree of their paths alone numbers them."""
        return sorted((0, *self.order[: size - 1]))

    def expected(self, log_p_Nn: Tensor, tree: Tree) -> Tensor:
        """Tokens [N, S] that a cycle should emit for each size: 1 and the probabilities of all drafts in the part.

        log_p_Nn: log softmax probability of every node's draft, given its path; what is there for the root is ignored.
        A node's probability is the product of the calibrated ones down its path.
        """
        return 1 + self.right(log_p_Nn, tree) @ _tables(self, tree, log_p_Nn.device).members_nS

    def right(self, log_p_Nn: Tensor, tree: Tree) -> Tensor:
        """float32 [N, n]: the probability that a node's draft and all above it are right; 0 at the root, no draft."""
        tables = _tables(self, tree, log_p_Nn.device)
        log_right_Nn = logsigmoid(tables.slope_n * log_odds(log_p_Nn) + tables.offset_n)
        log_right_Nn[:, 0] = 0
        right_Nn = (log_right_Nn @ tables.above_nn).exp()
        right_Nn[:, 0] = 0
        return right_Nn

    def choose(self, expected_NS: Tensor) -> int:
        """The size that all N requests of a batch verify, see above; of equals the smallest.

        The same numbers give the same size on every rank. One copy to the host.
        """
        return self.best(expected_NS.double().sum(dim=0).tolist(), len(expected_NS))

    def best(self, tokens_S: Sequence[float], requests: int) -> int:
        """`choose` by the sums over the batch."""
        worth = requests * interpolated(self.pace, self.batches, requests)
        gains = [tokens - worth * ms for tokens, ms in zip(tokens_S, self.costs(requests), strict=True)]
        return self.sizes[gains.index(max(gains))]

    def costs(self, requests: int) -> list[float]:
        """Milliseconds of a cycle by size. Linear between two known batches; beyond them as the nearest one."""
        return [interpolated(column, self.batches, requests) for column in zip(*self.cost_ms, strict=True)]

    def cost(self, size: int, requests: int) -> float:
        """Milliseconds of a cycle that verifies the part of this size."""
        return self.costs(requests)[self.sizes.index(size)]

    def plain(self, requests: int) -> float:
        """Milliseconds of a step without drafting."""
        return interpolated(self.plain_ms, self.batches, requests)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Any, tree: Tree) -> "Adaptive":
        """What `as_json` gave, from a file that anybody may have written. ValueError unless all of it fits `tree`."""
        names = [field.name for field in fields(cls)]
        if not isinstance(entry, Mapping) or entry.keys() != {*names}:
            raise ValueError(
                f"medusa_adaptive is {reprlib.repr(entry)}, expected an object with the keys {', '.join(names)}"
            )
        order = _integers(entry, "order", len(tree.paths), 1, len(tree.paths))
        seen = {0}
        for node in order:
            if node in seen or tree.parents[node] not in seen:
                raise ValueError(
                    f"medusa_adaptive.order has node {node} {'twice' if node in seen else 'before its parent'}; "
                    "expected every node of medusa_choices once, parents first"
                )
            seen.add(node)
        sizes = _ascending(entry, "sizes", MOST_SIZES, tree.num_nodes)
        if sizes[0] != 1 or sizes[-1] != tree.num_nodes:
            raise ValueError(
                f"medusa_adaptive.sizes are {reprlib.repr(sizes)}, expected 1 first and the tree's {tree.num_nodes} "
                "nodes last"
            )
        batches = _ascending(entry, "batches", MOST_BATCHES, LARGEST_BATCH)
        B = len(batches)
        up_to = entry["draft_up_to"]
        if type(up_to) is not int or not 0 <= up_to <= LARGEST_BATCH:
            raise ValueError(
                f"medusa_adaptive.draft_up_to is {reprlib.repr(up_to)}, expected an integer from 0 to {LARGEST_BATCH:,}"
            )
        calibration = [(slope, offset) for slope, offset in _rows(entry, "calibration", tree.depth, 2, -100, 100)]
        return cls(
            tuple(order),
            tuple(sizes),
            tuple(calibration),
            tuple(batches),
            tuple(tuple(row) for row in _rows(entry, "cost_ms", B, len(sizes), 1e-6, LARGEST_NUMBER)),
            tuple(_numbers(entry["plain_ms"], "plain_ms", B, 1e-6, LARGEST_NUMBER)),
            tuple(_numbers(entry["pace"], "pace", B, 0, LARGEST_NUMBER)),
            up_to,
        )


def log_odds(log_p: Tensor) -> Tensor:
    """log p - log(1 - p) in float32, bounded; of nan, which never should be, those of an unlikely draft."""
    log_p = log_p.float().nan_to_num(nan=-SURE)
    return (log_p - (-log_p.expm1()).log()).clamp(-SURE, SURE)


def interpolated(values: Sequence[float], batches: Sequence[int], requests: int) -> float:
    """The value at so many requests: linear between two known batches; beyond them as at the nearest one."""
    after = bisect_left(batches, requests)
    if after == len(batches) or after == 0 or batches[after] == requests:
        return values[min(after, len(batches) - 1)]
    share = (requests - batches[after - 1]) / (batches[after] - batches[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


@dataclass(frozen=True, eq=False)
class _Tables:
    """In float32. above_nn[i, j] is 1 where node i is node j or above it, members_nS where a part has the node."""

    slope_n: Tensor
    offset_n: Tensor
    above_nn: Tensor
    members_nS: Tensor


@lru_cache(maxsize=16)
def _tables(adaptive: Adaptive, tree: Tree, device: torch.device) -> _Tables:
    slope_n, offset_n = torch.tensor([(1.0, 0.0), *(adaptive.calibration[len(path) - 1] for path in tree.paths)]).T
    members_nS = torch.zeros(tree.num_nodes, len(adaptive.sizes))
    for s, size in enumerate(adaptive.sizes):
        members_nS[adaptive.nodes(size), s] = 1
    above_nn = tree.mask_nn.T.float().contiguous()
    return _Tables(*(tensor.to(device) for tensor in (slope_n, offset_n, above_nn, members_nS)))


def _integers(entry: Mapping[str, Any], key: str, length: int | None, least: int, most: int) -> list[int]:
    """entry[key], a list of `length` (None: any) integers from `least` to `most`."""
    given = entry[key]
    if (
        not isinstance(given, list | tuple)
        or (length is not None and len(given) != length)
        or any(type(number) is not int or not least <= number <= most for number in given)
    ):
        count = "" if length is None else f"{length} "
        raise ValueError(
            f"medusa_adaptive.{key} is {reprlib.repr(given)}, expected a list of {count}integers from {least} to "
            f"{most:,}"
        )
    return list(given)


def _ascending(entry: Mapping[str, Any], key: str, most_of_them: int, most: int) -> list[int]:
    """entry[key], 1 to `most_of_them` integers from 1 to `most`, each larger than the one before."""
    given = _integers(entry, key, None, 1, most)
    if not 1 <= len(given) <= most_of_them or any(a >= b for a, b in pairwise(given)):
        raise ValueError(
            f"medusa_adaptive.{key} is {reprlib.repr(given)}, expected 1 to {most_of_them} ascending integers"
        )
    return given


def _rows(entry: Mapping[str, Any], key: str, rows: int, columns: int, least: float, most: float) -> list[list[float]]:
    given = entry[key]
    if not isinstance(given, list | tuple) or len(given) != rows:
        raise ValueError(f"medusa_adaptive.{key} is {reprlib.repr(given)}, expected {rows} rows of {columns} numbers")
    return [_numbers(row, key, columns, least, most) for row in given]


def _numbers(given: Any, key: str, length: int, least: float, most: float) -> list[float]:
    """`given`, a list of so many finite numbers from `least` to `most`."""
    if (
        not isinstance(given, list | tuple)
        or len(given) != length
        or any(type(number) not in (int, float) or not least <= number <= most for number in given)
    ):
        raise ValueError(
            f"medusa_adaptive.{key} holds {reprlib.repr(given)}, expected {length} numbers from {least:g} to {most:g}"
        )
    return [float(number) for number in given]
