"""Random trees, texts that repeat themselves, and tables: for whatever drafts a continuation beside heads."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from medusa_k25.ngram.beside import LONGEST, SHORTEST, Beside
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.tree import Path, Tree

VOCAB = 12  # more than any tree of these is wide, so that siblings differ
AHEAD = 9  # more than any Beside of these drafts


@st.composite
def growing(draw: st.DrawFn, most_nodes: int = 10, depth: int = 3, width: int = 3) -> list[Path]:
    """Paths, each behind its parent: the first n - 1 are a tree of n nodes."""
    paths: list[Path] = []
    for _ in range(draw(st.integers(1, most_nodes - 1))):
        open_ = [
            (*parent, rank)
            for parent in [(), *paths]
            if len(parent) < depth
            for rank in range(width)
            if (*parent, rank) not in paths
        ]
        paths.append(draw(st.sampled_from(open_)))
    return paths


@st.composite
def besides(draw: st.DrawFn, most_nodes: int = 10) -> Beside:
    paths = draw(growing(most_nodes))
    chain = draw(st.integers(1, min(len(paths), 6)))
    table = draw(st.none() | tables())
    shortest = draw(st.integers(SHORTEST, LONGEST))
    return Beside(Tree(paths), Tree(paths[: len(paths) - chain]), shortest, draw(st.integers(shortest, LONGEST)), table)


@st.composite
def repeating(draw: st.DrawFn, least: int = 1, most: int = 40) -> list[int]:
    """Ids of few or many tokens of which stretches come again, some several times."""
    vocabulary = draw(st.sampled_from([2, 3, VOCAB]))
    ids = draw(st.lists(st.integers(0, vocabulary - 1), min_size=least, max_size=most // 2))
    for _ in range(draw(st.integers(0, 3)) if ids else 0):
        first = draw(st.integers(0, len(ids) - 1))
        ids += ids[first : first + draw(st.integers(1, 8))] * draw(st.integers(1, 3))
    return ids[:most]


@st.composite
def tables(draw: st.DrawFn) -> AnswersTable:
    answers = [draw(repeating(AHEAD + SHORTEST)), *draw(st.lists(repeating(), max_size=4))]
    return AnswersTable.build([torch.tensor(answer, dtype=torch.int32) for answer in answers], AHEAD)


def tokens_of(tree: Tree, root: int, ranked: Sequence[Sequence[int]]) -> list[int]:
    """Of every node; ranked[k][r]: choice r of head k + 1."""
    return [root, *(ranked[len(path) - 1][path[-1]] for path in tree.paths)]
