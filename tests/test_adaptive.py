"""The rule by which a server chooses how much of a tree a cycle verifies, and what it takes from a file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.adaptive import MOST_SIZES, Adaptive
from medusa_k25.tree import Growth, Tree

TREE = Tree([[0], [1], [0, 0], [0, 1], [0, 0, 0]])  # nodes 1 to 5 in this order
RULE = Adaptive(
    order=(1, 3, 2, 5, 4),
    sizes=(1, 2, 4, 6),
    calibration=((1.0, 0.0), (0.5, -1.0), (1.0, 1.0)),
    batches=(1, 8, 32),
    cost_ms=((11.0, 14.0, 20.0, 26.0), (12.0, 18.0, 30.0, 42.0), (14.0, 28.0, 56.0, 84.0)),
    plain_ms=(10.0, 11.0, 13.0),
    pace=(0.1, 0.09, 0.07),
    draft_up_to=8,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def log_p(*probabilities: float) -> torch.Tensor:
    """Of one request; the root's is ignored, whatever it is."""
    return torch.tensor([[float("nan"), *map(log, probabilities)]])


def test_expected_tokens_are_one_and_the_calibrated_probabilities_down_the_paths():
    first, second = 0.6, 0.3
    below, beside = (sigmoid(0.5 * log(p / (1 - p)) - 1) for p in (0.8, 0.1))
    deepest = sigmoid(log(0.5 / 0.5) + 1)
    expected_NS = RULE.expected(log_p(first, second, 0.8, 0.1, 0.5), TREE)
    whole = 1 + first + second + first * below + first * beside + first * below * deepest
    torch.testing.assert_close(
        expected_NS, torch.tensor([[1, 1 + first, 1 + first + first * below + second, whole]]), rtol=1e-6, atol=1e-6
    )


def test_parts_are_numbered_as_trees_of_their_own():
    assert [RULE.nodes(size) for size in RULE.sizes] == [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert [TREE.paths[node - 1] for node in RULE.nodes(4)[1:]] == list(Tree([[0], [0, 0], [1]]).paths)


def test_certain_and_impossible_drafts_are_numbers():
    log_p_Nn = torch.tensor([[0.0, 0.0, float("-inf"), float("nan"), -1e30, 0.0]])
    expected_NS = RULE.expected(log_p_Nn, TREE)
    assert expected_NS.isfinite().all()
    assert expected_NS[0, 1].item() == pytest.approx(2, abs=1e-5)


def test_the_choice_is_made_for_the_batch_at_its_own_costs():
    unsure, sure = [1.0, 1.1, 1.15, 1.2], [1.0, 1.95, 3.3, 4.2]
    assert RULE.choose(torch.tensor([unsure])) == 1  # 0.1 tokens more for 3 ms, which are worth 0.3
    assert RULE.choose(torch.tensor([sure])) == 6
    assert RULE.choose(torch.tensor([sure, *[unsure] * 7])) == 1  # one sure request of eight
    assert RULE.choose(torch.tensor([sure] * 8)) == 4  # 0.9 tokens more for 12 ms, which are worth 1.08
    assert RULE.choose(torch.tensor([sure] * 32)) == 1


def test_costs_between_two_batches_lie_between_theirs():
    assert RULE.costs(1) == [11.0, 14.0, 20.0, 26.0]
    assert RULE.costs(20) == [13.0, 23.0, 43.0, 63.0]
    assert RULE.costs(100) == RULE.costs(32) == [14.0, 28.0, 56.0, 84.0]
    assert replace(RULE, batches=(4, 8, 32)).costs(2) == RULE.costs(1)


def test_of_equals_the_smallest():
    assert replace(RULE, pace=(0.0, 0.0, 0.0)).choose(torch.ones(3, 4)) == 1


# ------------------------------------------------------------------------------ properties

numbers = st.floats(0.01, 1, allow_nan=False)


@st.composite
def rules(draw: st.DrawFn) -> tuple[Adaptive, Tree]:
    ranks_NK = torch.tensor(draw(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1)))
    growth = Growth.by_count(ranks_NK, draw(st.integers(2, 12)), 3)
    tree = Tree(growth.paths)
    number = {path: node for node, path in enumerate(tree.paths, start=1)}
    inner = draw(st.sets(st.integers(2, max(2, tree.num_nodes)), max_size=MOST_SIZES - 2))
    sizes = tuple(sorted({1, tree.num_nodes, *(size for size in inner if size < tree.num_nodes)}))
    batches = tuple(sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3))))

    def row(length: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(numbers, min_size=length, max_size=length)))

    rule = Adaptive(
        tuple(number[path] for path in growth.paths),
        sizes,
        tuple((draw(st.floats(-2, 2)), draw(st.floats(-2, 2))) for _ in range(tree.depth)),
        batches,
        tuple(row(len(sizes)) for _ in batches),
        row(len(batches)),
        row(len(batches)),
        draw(st.integers(0, batches[-1])),
    )
    return rule, tree


@given(rules(), st.integers(0, 1 << 16), st.integers(1, 5))
def test_more_nodes_promise_more_and_the_choice_is_brute_force(case, seed, N):
    rule, tree = case
    log_p_Nn = torch.randn(N, tree.num_nodes, generator=torch.Generator().manual_seed(seed)).sub(1).clamp(max=0)
    expected_NS = rule.expected(log_p_Nn, tree)
    assert (expected_NS[:, 0] == 1).all()
    assert (expected_NS.diff(dim=1) >= -1e-6).all()
    assert (expected_NS <= tree.num_nodes + 1e-4).all()

    def gain(s: int) -> float:  # of the whole batch, at the costs of so many requests
        return sum(expected_NS.double()[:, s].tolist()) - N * at(rule.pace) * at([row[s] for row in rule.cost_ms])

    def at(values: Sequence[float]) -> float:
        known = dict(zip(rule.batches, values, strict=True))
        below, above = [b for b in known if b <= N], [b for b in known if b >= N]
        if not below or not above:
            return known[below[-1] if below else above[0]]
        b, c = below[-1], above[0]
        return known[b] if b == c else known[b] + (known[c] - known[b]) * (N - b) / (c - b)

    gains = [gain(s) for s in range(len(rule.sizes))]
    assert gains[rule.sizes.index(rule.choose(expected_NS))] == pytest.approx(max(gains), abs=1e-9)


@given(rules())
def test_parts_are_closed_under_parents_and_survive_json(case):
    rule, tree = case
    for size in rule.sizes:
        nodes = rule.nodes(size)
        assert len(nodes) == size and all(tree.parents[node] in nodes for node in nodes[1:])
    assert Adaptive.from_json(json.loads(json.dumps(rule.as_json())), tree) == rule


# ------------------------------------------------------------------------------ what a file may hold


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": [1, 3, 2, 5]}, "order is .* expected a list of 5 integers from 1 to 5"),
        ({"order": [1, 3, 2, 5, 5]}, "order has node 5 twice"),
        ({"order": [3, 1, 2, 5, 4]}, "order has node 3 before its parent"),
        ({"order": [1, 3, 2, 5, True]}, "order is"),
        ({"order": 7}, "order is 7"),
        ({"sizes": [2, 4, 6]}, "sizes are .* expected 1 first and the tree's 6 nodes last"),
        ({"sizes": [1, 2, 4]}, "sizes are"),
        ({"sizes": [1, 4, 2, 6]}, "sizes is .* ascending"),
        ({"sizes": []}, "sizes is"),
        ({"sizes": [1, 2.0, 6]}, "sizes is"),
        ({"calibration": [[1.0, 0.0]] * 2}, "calibration is .* expected 3 rows of 2 numbers"),
        ({"calibration": [[1.0, 0.0]] * 2 + [[1.0]]}, "calibration holds .* expected 2 numbers"),
        ({"calibration": [[1.0, 0.0]] * 2 + [[1.0, float("nan")]]}, "calibration holds"),
        ({"calibration": [[1.0, 0.0]] * 2 + [["1", 0]]}, "calibration holds"),
        ({"batches": [1, 8]}, "cost_ms is .* expected 2 rows of 4 numbers"),
        ({"batches": [0, 8, 32]}, "batches is"),
        ({"batches": [1, 1 << 40]}, "batches is"),
        ({"cost_ms": [[1.0, 2.0, 3.0, 4.0]] * 2 + [[1.0, 2.0, 3.0, 0.0]]}, "cost_ms holds"),
        ({"cost_ms": [[1.0, 2.0, 3.0, 4.0]] * 2 + [None]}, "cost_ms holds None"),
        ({"plain_ms": [1.0, 2.0, float("inf")]}, "plain_ms holds"),
        ({"plain_ms": [1.0, 2.0, 10**400]}, "plain_ms holds"),
        ({"pace": [0.1]}, "pace holds .* expected 3 numbers"),
        ({"draft_up_to": -1}, "draft_up_to is -1"),
        ({"draft_up_to": 1.5}, "draft_up_to is 1.5"),
        ({"more": 1}, "expected an object with the keys order, sizes"),
    ],
)
def test_anything_malformed_is_refused(changes, message):
    entry = json.loads(json.dumps(RULE.as_json())) | changes
    with pytest.raises(ValueError, match=f"medusa_adaptive.*{message}"):
        Adaptive.from_json(entry, TREE)


@pytest.mark.parametrize("entry", [None, [], "x", {}, {"order": []}])
def test_what_is_no_such_object_is_refused(entry):
    with pytest.raises(ValueError, match="medusa_adaptive is"):
        Adaptive.from_json(entry, TREE)


def test_of_another_tree_it_is_refused():
    with pytest.raises(ValueError, match="order is"):
        Adaptive.from_json(RULE.as_json(), Tree.chain(4))
