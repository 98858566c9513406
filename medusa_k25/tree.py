"""A static tree of drafts, as rank paths.

Only the sorted list of paths is stored: (0, 2) is the third choice of head 2 below the best choice of head 1; the root,
the token that the target itself produced, is the empty path and is not listed. All else is derived.

Letters: N positions, K heads, n nodes (root included, as SGLang's `speculative_num_draft_tokens` counts).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

Path = tuple[int, ...]


class Tree:
    """`paths` in any order; every path's parent must be among them. Nodes are numbered by depth, then by path."""

    def __init__(self, paths: Iterable[Sequence[int]]):
        unique = {tuple(int(rank) for rank in path) for path in paths}
        unique.discard(())
        for path in unique:
            if min(path) < 0:
                raise ValueError(f"tree path {list(path)} holds a negative rank; ranks count from 0")
            if len(path) > 1 and path[:-1] not in unique:
                raise ValueError(f"tree path {list(path)} has no parent; add {list(path[:-1])} to the paths")
        self.paths: tuple[Path, ...] = tuple(sorted(unique, key=lambda path: (len(path), path)))

    @classmethod
    def chain(cls, depth: int) -> "Tree":
        """Best choices only: 1 + `depth` nodes."""
        return cls([(0,) * d for d in range(1, depth + 1)])

    @classmethod
    def best(cls, ranks_NK: Tensor, num_nodes: int, max_width: int) -> "Tree":
        """The tree of at most `num_nodes` nodes that accepts most on the positions whose label ranks are given.

        A tree accepts, at a position, the longest prefix of that position's rank path that it contains; so its
        acceptance is the sum over its paths of how often each was a prefix, and taking the most frequent paths is
        optimal. (A parent is at least as frequent as its child, and shorter paths win ties, so parents come along.)
        Counted jointly: no independence of the heads is assumed. Only ranks below `max_width` are drafted.
        Fewer nodes come back when fewer paths were ever right.
        """
        counted: list[tuple[int, int, Path]] = []
        alive_NK = ranks_NK
        for depth in range(1, ranks_NK.shape[1] + 1):
            alive_NK = alive_NK[alive_NK[:, depth - 1] < max_width]
            prefixes, counts = alive_NK[:, :depth].unique(dim=0, return_counts=True)
            counted += [
                (-count, depth, tuple(path)) for path, count in zip(prefixes.tolist(), counts.tolist(), strict=True)
            ]
        return cls(path for _, _, path in sorted(counted)[: num_nodes - 1])

    @property
    def chain_part(self) -> "Tree":
        """The best choices below the best choices: what a server can verify that takes no tree."""
        return Tree(path for path in self.paths if not any(path))

    @property
    def num_nodes(self) -> int:
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path: how many heads the tree needs."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Largest rank + 1: how many choices of a head the tree needs."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @cached_property
    def parents(self) -> list[int]:
        """Node number of each node's parent; -1 for the root (node 0)."""
        number = {path: i for i, path in enumerate(self.paths, start=1)} | {(): 0}
        return [-1] + [number[path[:-1]] for path in self.paths]

    @cached_property
    def children(self) -> list[list[int]]:
        """Node numbers of each node's children, best rank first."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return children

    @cached_property
    def depths_n(self) -> Tensor:
        return torch.tensor([0, *map(len, self.paths)])

    @cached_property
    def mask_nn(self) -> Tensor:
        """bool [n, n]: row i is True at i and at its ancestors, which is all that node i may attend to in the tree."""
        mask_nn = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask_nn[node] |= mask_nn[parent]
        return mask_nn

    def accepted(self, ranks_NK: Tensor) -> Tensor:
        """Drafts accepted at each position, int64 [N]; ranks_NK[:, k - 1] is the rank of head k's label there."""
        base = self.width + 1  # rank `width` stands for every rank that no path holds
        ranks_NK = ranks_NK[:, : self.depth].clamp(max=self.width)
        code_N = torch.zeros(len(ranks_NK), dtype=torch.long)
        alive_N = torch.ones(len(ranks_NK), dtype=torch.bool)
        accepted_N = torch.zeros(len(ranks_NK), dtype=torch.long)
        for d in range(1, min(self.depth, ranks_NK.shape[1]) + 1):
            codes = torch.tensor([self._code(path, base) for path in self.paths if len(path) == d])
            code_N = code_N * base + ranks_NK[:, d - 1]
            alive_N &= torch.isin(code_N, codes)
            accepted_N += alive_N
        return accepted_N

    @staticmethod
    def _code(path: Path, base: int) -> int:
        code = 0
        for rank in path:
            code = code * base + rank
        return code

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
