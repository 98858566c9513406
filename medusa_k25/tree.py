"""A static tree of drafts, as rank paths, and in which order a tree grows.

Only the sorted list of paths is stored: (0, 2) is the third choice of head 2 below the best choice of head 1; the root,
the token that the target itself produced, is the empty path and is not listed. All else is derived.

Letters: N positions, K heads, R choices of a head, P paths (in a `Level`: drafters), C nodes of one depth, n nodes
(root included, as SGLang's `speculative_num_draft_tokens` counts).
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Path = tuple[int, ...]


def places(paths: Sequence[Path], ranks_NK: Tensor) -> Tensor:
    """int64 [N, K]: where in `paths` the first k ranks of each position are; len(paths) where they are not.

    Every path's parent must be among them. ranks_NK[:, k - 1] is the rank of head k's label.
    """
    none, root = len(paths), len(paths) + 1
    width = max(map(max, paths), default=-1) + 1  # rank `width` stands for every rank that no path holds
    place = {path: i for i, path in enumerate(paths)} | {(): root}
    next_table = [[none] * (width + 1) for _ in range(len(paths) + 2)]
    for i, path in enumerate(paths):
        next_table[place[path[:-1]]][path[-1]] = i
    next_C = torch.tensor(next_table).flatten()
    at_N = torch.full((len(ranks_NK),), root)
    places_NK = torch.empty_like(ranks_NK, dtype=torch.long)
    for k in range(ranks_NK.shape[1]):
        at_N = next_C[at_N * (width + 1) + ranks_NK[:, k].clamp(max=width)]
        places_NK[:, k] = at_N
    return places_NK


@dataclass(frozen=True)
class Level:
    """How the nodes of one depth are drafted: a head drafts once for each of P drafters, and each node takes a choice.

    nodes_P: where the drafters are among the nodes of the depth above; above_P: by which drafter of the level above
    each of them was drafted, whose state it goes on from. drafter_C, rank_C: whose choice each node is, and which one.
    width: how many choices of a drafter are taken.
    """

    nodes_P: Tensor
    above_P: Tensor
    drafter_C: Tensor
    rank_C: Tensor
    width: int

    def to(self, device: torch.device | str) -> "Level":
        nodes_P, above_P = self.nodes_P.to(device), self.above_P.to(device)
        return Level(nodes_P, above_P, self.drafter_C.to(device), self.rank_C.to(device), self.width)


class Topology:
    """Nodes below a root, whatever they carry. parents: each node's, which comes before it; -1 for the root, node 0."""

    def __init__(self, parents: Sequence[int]):
        assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
        self.parents = list(parents)

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Drafts on the longest path."""
        return int(self.depths_n.max())

    @cached_property
    def children(self) -> list[list[int]]:
        """Node numbers of each node's children, in their order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return children

    @cached_property
    def depths_n(self) -> Tensor:
        return self.mask_nn.sum(dim=1) - 1

    @cached_property
    def mask_nn(self) -> Tensor:
        """bool [n, n]: row i is True at i and at its ancestors, which is all that node i may attend to in the tree."""
        mask_nn = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask_nn[node] |= mask_nn[parent]
        return mask_nn


class Tree(Topology):
    """`paths` in any order; every path's parent must be among them. Nodes are numbered by depth, then by path: so a
    node's children come best rank first."""

    def __init__(self, paths: Iterable[Sequence[int]]):
        unique = {tuple(int(rank) for rank in path) for path in paths}
        unique.discard(())
        for path in unique:
            if min(path) < 0:
                raise ValueError(f"tree path {list(path)} holds a negative rank; ranks count from 0")
            if len(path) > 1 and path[:-1] not in unique:
                raise ValueError(f"tree path {list(path)} has no parent; add {list(path[:-1])} to the paths")
        self.paths: tuple[Path, ...] = tuple(sorted(unique, key=lambda path: (len(path), path)))
        number = {path: i for i, path in enumerate(self.paths, start=1)} | {(): 0}
        super().__init__([-1] + [number[path[:-1]] for path in self.paths])

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """Best choices only: 1 + `depth` nodes."""
        return cls([(0,) * d for d in range(1, depth + 1)])

    @property
    def chain_part(self) -> "Tree":
        """The best choices below the best choices: what a server can verify that takes no tree."""
        return Tree(path for path in self.paths if not any(path))

    @property
    def width(self) -> int:
        """Largest rank + 1: how many choices of a head the tree needs."""
        return max((max(path) for path in self.paths), default=-1) + 1

    def levels(self, by_path: bool) -> list[Level]:
        """One for each depth from 1 on; in each the nodes have their order in the tree.

        by_path: the drafts depend on the path, so that every node with children is a drafter; else one drafts for all.
        """
        levels, above = list[Level](), list[Path]([()])
        drafted_by: dict[Path, int] = {(): 0}
        for depth in range(1, self.depth + 1):
            nodes = [path for path in self.paths if len(path) == depth]
            drafters = list(dict.fromkeys(path[:-1] for path in nodes)) if by_path else above[:1]
            number = {path: i for i, path in enumerate(drafters)}
            drafter_C = [number[path[:-1]] if by_path else 0 for path in nodes]
            ranks_C = [path[-1] for path in nodes]
            levels.append(
                Level(
                    torch.tensor([above.index(path) for path in drafters]),
                    torch.tensor([drafted_by[path] for path in drafters]),
                    torch.tensor(drafter_C),
                    torch.tensor(ranks_C),
                    max(ranks_C) + 1,
                )
            )
            above, drafted_by = nodes, dict(zip(nodes, drafter_C, strict=True))
        return levels

    def accepted(self, ranks_NK: Tensor) -> Tensor:
        """Drafts accepted at each position, int64 [N]; ranks_NK[:, k - 1] is the rank of head k's label there."""
        return (places(self.paths, ranks_NK) < len(self.paths)).sum(dim=1)

    def refuse_unless_fits(self, num_heads: int, vocab_size: int) -> None:
        """ValueError when the heads cannot fill this tree."""
        if self.depth > num_heads:
            raise ValueError(f"the tree is {self.depth} deep but there are {num_heads} heads; choose a shallower tree")
        if self.width > vocab_size:
            raise ValueError(
                f"the tree asks for choice {self.width} of a head, but the heads rank {vocab_size} tokens; "
                "choose a narrower tree"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"Tree({[list(path) for path in self.paths]})"


@dataclass(frozen=True)
class Growth:
    """The order in which paths join a tree: the tree of n nodes is the first n - 1, so each holds the smaller ones.

    shares: of the positions, where each path is right (by count) or should be (by product), which fall along the order
    and along every path.
    """

    paths: tuple[Path, ...]
    shares: tuple[float, ...]

    @classmethod
    def by_count(cls, ranks_NK: Tensor, most_nodes: int, max_width: int) -> "Growth":
        """Trees that accept most on the positions whose label ranks are given: of `most_nodes` nodes and of fewer.

        A tree accepts, at a position, the longest prefix of that position's rank path that it contains; so its
        acceptance is the sum over its paths of how often each was a prefix, and taking the most frequent paths is
        optimal. (A parent is at least as frequent as its child, and shorter paths win ties, so parents come along. Of
        equally frequent paths of one length the lower ranks win: other trees can be as good, none is better.)
        Counted jointly: no independence of the heads is assumed. Only ranks below `max_width` are drafted.

        What is optimised is the mean over the positions given. A server drafts only where its walk stops, and which
        positions those are depends on the tree: see `replay.grow_where_walks_stop`.
        """
        N, K = ranks_NK.shape
        counted: list[tuple[int, int, Path]] = []
        parents: list[Path] = [()]
        row_N, parent_N = torch.arange(N), torch.zeros(N, dtype=torch.long)
        for depth in range(1, K + 1):
            rank_N = ranks_NK[row_N, depth - 1]
            kept = rank_N < max_width
            row_N, code_N = row_N[kept], parent_N[kept] * max_width + rank_N[kept]
            count_C = torch.bincount(code_N, minlength=len(parents) * max_width)
            code_P = count_C.nonzero().flatten()
            # what comes behind most_nodes of its own length is in no tree, nor is anything below it
            code_P = code_P[count_C[code_P].sort(descending=True, stable=True).indices[: most_nodes - 1]].sort().values
            paths = [parents[code // max_width] + (code % max_width,) for code in code_P.tolist()]
            counted += [(-count, depth, path) for count, path in zip(count_C[code_P].tolist(), paths, strict=True)]
            place_C = torch.full_like(count_C, -1)
            place_C[code_P] = torch.arange(len(code_P))
            parent_N = place_C[code_N]
            row_N, parent_N = row_N[parent_N >= 0], parent_N[parent_N >= 0]
            parents = paths
        first = sorted(counted)[: most_nodes - 1]
        return cls(tuple(path for _, _, path in first), tuple(-count / N for count, _, _ in first))

    @classmethod
    def by_product(cls, accuracy_KR: Sequence[Sequence[float]], most_nodes: int) -> "Growth":
        """As the original Medusa code values a path: the product of how often each head is right at that rank.

        accuracy_KR[k][r]: share of head k+1's labels that are its choice r. A path that is never right is not taken.
        """
        paths: list[Path] = []
        shares: list[float] = []
        waiting: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
        while waiting and len(paths) < most_nodes:
            value, depth, path = heapq.heappop(waiting)
            paths.append(path)
            shares.append(-value)
            for rank, accuracy in enumerate(accuracy_KR[depth] if depth < len(accuracy_KR) else ()):
                if accuracy > 0:
                    heapq.heappush(waiting, (value * accuracy, depth + 1, path + (rank,)))
        return cls(tuple(paths[1:]), tuple(shares[1:]))

    @classmethod
    def of_tree(cls, tree: Tree, ranks_NK: Tensor) -> "Growth":
        """The paths of a given tree in the order of `by_count`: how often each is right at the positions given."""
        counts = torch.bincount(places(tree.paths, ranks_NK).flatten(), minlength=len(tree.paths) + 1).tolist()
        order = sorted((-count, len(path), path) for count, path in zip(counts, tree.paths, strict=False))
        return cls(tuple(path for *_, path in order), tuple(-count / len(ranks_NK) for count, *_ in order))

    @classmethod
    def chain(cls, depth: int) -> "Growth":
        """Best choices only, one below the other. How often they are right is not known."""
        return cls(tuple((0,) * d for d in range(1, depth + 1)), (float("nan"),) * depth)

    @property
    def most_nodes(self) -> int:
        return len(self.paths) + 1

    def tree(self, num_nodes: int) -> Tree:
        """Raises ValueError where fewer paths were ever right."""
        if num_nodes > self.most_nodes:
            raise ValueError(
                f"a tree of {num_nodes} nodes needs {num_nodes - 1} paths, and on calibration text only "
                f"{len(self.paths)} were ever right: ask for at most {self.most_nodes} nodes, allow a larger "
                "max_width, or capture more conversations"
            )
        return Tree(self.paths[: num_nodes - 1])
