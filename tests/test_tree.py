from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.metrics import MISS
from medusa_k25.tree import Growth, Path, Tree, places

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


def every_tree(depth: int, width: int, num_drafts: int) -> Iterator[frozenset[Path]]:
    """All trees of so many drafts, whatever their shape."""
    trees = {frozenset[Path]()}
    for _ in range(num_drafts):
        trees = {
            tree | {parent + (rank,)}
            for tree in trees
            for parent in [(), *tree]
            for rank in range(width)
            if len(parent) < depth and parent + (rank,) not in tree
        }
    yield from trees


def total(tree: frozenset[Path], rows: list[list[int]]) -> int:
    """Drafts accepted over all positions."""
    accepted = 0
    for row in rows:
        length = 0
        while length < len(row) and tuple(row[: length + 1]) in tree:
            length += 1
        accepted += length
    return accepted


def test_every_tree_is_every_tree():
    # of a width of 3, without a limit of depth: C(3m, m) / (2m + 1) trees of m drafts
    assert [len(set(every_tree(9, 3, m))) for m in range(6)] == [1, 3, 12, 55, 273, 1428]
    assert set(every_tree(2, 1, 2)) == {frozenset({(0,), (0, 0)})}


TREES = {
    (K, width, drafts): list(every_tree(K, width, drafts))
    for K in (1, 2, 3)
    for width in (1, 2, 3)
    for drafts in range(1, 6)
}


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_no_tree_accepts_more_than_the_one_by_count(K, width, data):
    rank = st.sampled_from([0, 0, 1, 1, 2, 3, MISS])
    rows = data.draw(st.lists(st.lists(rank, min_size=K, max_size=K), min_size=1, max_size=12))
    ranks_NK = torch.tensor(rows)
    growth = Growth.by_count(ranks_NK, 6, width)
    for num_nodes in range(2, growth.most_nodes + 1):
        tree = growth.tree(num_nodes)
        assert tree.num_nodes == num_nodes
        assert tree.width <= width
        accepted = total(frozenset(tree.paths), rows)
        assert accepted == max(total(other, rows) for other in TREES[K, width, num_nodes - 1])
        assert int(tree.accepted(ranks_NK).sum()) == accepted
    if growth.most_nodes < 6:  # then it already accepts all that can be accepted
        best = max((total(other, rows) for other in TREES[K, width, 5]), default=0)
        assert total(frozenset(growth.paths), rows) >= best


@given(ranks, st.integers(1, 12))
def test_shares_are_how_often_a_path_was_right_and_fall(rows, most_nodes):
    growth = Growth.by_count(torch.tensor(rows), most_nodes, max_width=3)
    by_hand = [sum(tuple(row[: len(path)]) == path for row in rows) / len(rows) for path in growth.paths]
    assert list(growth.shares) == by_hand == sorted(by_hand, reverse=True)
    assert growth.paths == Growth.by_count(torch.tensor(rows), 40, max_width=3).paths[: most_nodes - 1]


def test_of_equal_paths_the_shorter_and_then_the_lower_ranks_come_first():
    growth = Growth.by_count(torch.tensor([[1, 0], [0, 1], [0, 2], [1, 2]]), 9, max_width=3)
    assert growth.paths == ((0,), (1,), (0, 1), (0, 2), (1, 0), (1, 2))
    assert growth.shares == (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)


def test_more_nodes_than_paths_were_right_are_refused():
    growth = Growth.by_count(torch.tensor([[0, 0], [3, 0], [1, MISS]]), 64, max_width=3)
    assert growth.tree(4) == Tree([[0], [1], [0, 0]])
    with pytest.raises(
        ValueError, match="a tree of 5 nodes needs 4 paths, and on calibration text only 3 were .* at most 4"
    ):
        growth.tree(5)


def test_the_product_takes_the_heads_for_independent():
    # head 2 is right only where head 1 is not: the joint count knows, the product does not
    ranks_NK = torch.tensor([[0, 1]] * 6 + [[1, 0]] * 4)
    accuracy_KR = [[0.6, 0.4], [0.4, 0.6]]
    assert Growth.by_product(accuracy_KR, 4).paths == ((0,), (1,), (0, 1))
    assert Growth.by_product(accuracy_KR, 5).shares == pytest.approx((0.6, 0.4, 0.36, 0.24))
    assert Growth.by_product(accuracy_KR, 5).paths[3] == (0, 0)  # never right
    assert Growth.by_count(ranks_NK, 5, 2).paths == ((0,), (0, 1), (1,), (1, 0))
    assert Growth.by_product([[1.0, 0.0], [1.0, 0.0]], 9).paths == ((0,), (0, 0))


accuracies = st.integers(0, 8).map(lambda eighths: eighths / 8)


@given(st.lists(st.lists(accuracies, min_size=2, max_size=3), min_size=1, max_size=3), st.integers(1, 30))
def test_the_tree_by_product_has_the_most_valuable_paths(accuracy_KR, most_nodes):
    growth = Growth.by_product(accuracy_KR, most_nodes)
    values: dict[Path, float] = {(): 1.0}
    for shares in accuracy_KR:
        deepest = max(map(len, values))
        for path in [path for path in values if len(path) == deepest]:
            values |= {path + (rank,): values[path] * share for rank, share in enumerate(shares)}
    del values[()]
    best = sorted((value for value in values.values() if value > 0), reverse=True)[: most_nodes - 1]
    assert list(growth.shares) == best
    assert list(growth.shares) == [values[path] for path in growth.paths]
    growth.tree(growth.most_nodes)  # every parent is there


@given(ranks)
def test_a_position_is_where_its_rank_path_is(rows):
    growth = Growth.by_count(torch.tensor(rows), 9, max_width=3)
    places_NK = places(growth.paths, torch.tensor(rows)).tolist()
    assert places_NK == [
        [growth.paths.index(path) if (path := tuple(row[:k])) in growth.paths else len(growth.paths) for k in (1, 2, 3)]
        for row in rows
    ]


@given(ranks)
def test_acceptance_is_the_sum_of_the_path_frequencies(rows):
    ranks_NK = torch.tensor(rows)
    paths = [(0,), (1,), (0, 1), (1, 1), (0, 1, 2)]
    by_hand = sum(tuple(row[: len(path)]) == path for row in rows for path in paths)
    assert int(Tree(paths).accepted(ranks_NK).sum()) == by_hand
