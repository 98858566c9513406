import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.metrics import MISS
from medusa_k25.tree import Tree

SMALL = Tree([[0], [1], [0, 0], [0, 2], [0, 0, 0]])


def test_nodes_are_numbered_by_depth_then_path_and_all_else_follows():
    assert SMALL.paths == ((0,), (1,), (0, 0), (0, 2), (0, 0, 0))
    assert (SMALL.num_nodes, SMALL.depth, SMALL.width) == (6, 3, 3)
    assert SMALL.parents == [-1, 0, 0, 1, 1, 3]
    assert SMALL.children == [[1, 2], [3, 4], [], [5], [], []]
    assert SMALL.depths_n.tolist() == [0, 1, 1, 2, 2, 3]
    assert SMALL.mask_nn.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_a_chain_of_four_drafts_has_five_nodes():
    assert Tree.chain(4).num_nodes == 5
    assert Tree.chain(0) == Tree([])
    assert Tree([]).accepted(torch.zeros(3, 4, dtype=torch.long)).tolist() == [0, 0, 0]


def test_accepts_the_longest_prefix_that_it_holds():
    ranks_NK = torch.tensor([[0, 0, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [0, MISS, 0, 0], [0, 0, MISS, 0]])
    assert SMALL.accepted(ranks_NK).tolist() == [3, 2, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("paths", "message"), [([[0], [1, 0]], r"\[1, 0\] has no parent"), ([[0], [0, -1]], "negative rank")]
)
def test_bad_paths_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        Tree(paths)


def test_a_tree_that_the_heads_cannot_fill_is_refused():
    with pytest.raises(ValueError, match="3 deep but there are 2 heads"):
        SMALL.refuse_unless_fits(num_heads=2, vocab_size=10)
    with pytest.raises(ValueError, match="choice 3 of a head, but the heads rank 2 tokens"):
        SMALL.refuse_unless_fits(num_heads=3, vocab_size=2)


ranks = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, MISS]), min_size=3, max_size=3), min_size=1, max_size=30)


@given(ranks, st.integers(1, 12))
def test_the_best_tree_beats_every_tree_of_its_size_that_is_grown_node_by_node(rows, num_nodes):
    ranks_NK = torch.tensor(rows)
    best = Tree.best(ranks_NK, num_nodes, max_width=3)
    assert best.num_nodes <= num_nodes
    assert best.width <= 3

    def total(tree: Tree) -> int:
        return int(tree.accepted(ranks_NK).sum())

    grown: list[tuple[int, ...]] = []
    while len(grown) < num_nodes - 1:
        fitting = [p[:-1] + (r,) for p in [*(g + (0,) for g in grown), (0,)] for r in range(3) if len(p) <= 3]
        options = [path for path in fitting if path not in grown]
        if not options:
            break
        grown.append(max(options, key=lambda path: total(Tree([*grown, path]))))
    assert total(best) >= total(Tree(grown))


@given(ranks)
def test_acceptance_is_the_sum_of_the_path_frequencies(rows):
    ranks_NK = torch.tensor(rows)
    paths = [(0,), (1,), (0, 1), (1, 1), (0, 1, 2)]
    by_hand = sum(tuple(row[: len(path)]) == path for row in rows for path in paths)
    assert int(Tree(paths).accepted(ranks_NK).sum()) == by_hand
