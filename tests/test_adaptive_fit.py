"""Calibration, costs and the clock of adaptive drafting; and that it never loses what it is there to save."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.adaptive import Adaptive
from medusa_k25.config import compose
from medusa_k25.costs.cycle import CycleModel
from medusa_k25.costs.served import KIMI_K25
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import HEADS, DraftVocabulary, RecurrentHeads, Speculator
from medusa_k25.metrics import MISS
from medusa_k25.replay import walk_all
from medusa_k25.serving.adaptive_fit import (
    BATCHES,
    PAYS_FROM,
    Costs,
    Priced,
    Walkable,
    adaptive_note,
    answer_log_p,
    calibrated,
    clocked,
    fitted,
    right_drafts,
)
from medusa_k25.serving.decode import Drafter
from medusa_k25.tree import Tree
from tests.tiny import cache_of

TREE = Tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])


@pytest.fixture(scope="module")
def cache(tiny_llama, tmp_path_factory):
    return cache_of(tiny_llama, tmp_path_factory.mktemp("adaptive") / "cache", num_documents=4)


# ------------------------------------------------------------------------------ how sure the heads are


@pytest.mark.parametrize("kind", HEADS)
def test_log_p_is_that_of_each_draft_below_the_drafts_on_its_path(kind, tiny_llama, cache, monkeypatch):
    torch.manual_seed(0)
    vocabulary = DraftVocabulary.most_frequent(torch.arange(tiny_llama.vocab_size, 0, -1), 300)
    heads = HEADS[kind](tiny_llama.hidden_size, num_heads=3, draft_vocab_size=300)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    speculator = Speculator.of(heads, vocabulary, tiny_llama)
    drafter, document = Drafter(speculator, TREE), cache.documents[0]
    [(hidden_SD, future_SK)] = answers_of(cache, document, 3)
    tokens_Sn, log_p_Sn = drafter.draft_all(hidden_SD, future_SK[:, 0])
    for state in (0, 5):
        assert drafter.draft(hidden_SD[state], int(future_SK[state, 0])) == tokens_Sn[state].tolist()
        for node, path in enumerate(TREE.paths, start=1):
            above = [place for place in range(1, TREE.num_nodes) if TREE.mask_nn[node, place]]
            path_1K = torch.zeros(1, 3, dtype=torch.long)
            path_1K[0, : len(path)] = tokens_Sn[state, [0, *above[:-1]]]
            feature_D = speculator.features(hidden_SD[state][None], path_1K)[len(path) - 1, 0]
            log_p_M = (feature_D @ speculator.lm_head_MD.T).log_softmax(0)
            best = log_p_M.topk(3).indices[path[-1]]
            assert tokens_Sn[state, node] == vocabulary.to_target(best)
            assert log_p_Sn[state, node].item() == pytest.approx(log_p_M[best].item(), abs=1e-3)
    monkeypatch.setattr("medusa_k25.serving.adaptive_fit.LOGITS", 5000)  # a few states at a time
    torch.testing.assert_close(answer_log_p(drafter, cache, [document]), [log_p_Sn], rtol=1e-4, atol=1e-3)


@given(st.lists(st.lists(st.sampled_from([0, 1, 2, MISS]), min_size=3, max_size=3), min_size=1, max_size=9))
def test_right_drafts_are_those_that_the_text_goes_on_with(ranks):
    right_Nn = right_drafts(TREE, torch.tensor(ranks))
    assert right_Nn[:, 0].all()
    for row, ranks_K in zip(right_Nn, ranks, strict=True):
        assert row[1:].tolist() == [tuple(ranks_K[: len(path)]) == path for path in TREE.paths]
        assert row.sum() - 1 == TREE.accepted(torch.tensor([ranks_K]))[0]


def text_of(
    tree: Tree, states: int, seed: int, slope: float, offset: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(log_p [S, n], ranks [S, K]) of answers of 40 states: drafts that are right with a calibrated probability.

    States differ in how sure the heads are. Of a node's children at most one is right: so their probabilities are
    those of one softmax, calibrated with (slope, offset).
    """
    generator = torch.Generator().manual_seed(seed)
    sharp_N1 = 4 * torch.rand(states, 1, generator=generator)
    log_p_Nn = torch.zeros(states, tree.num_nodes)
    ranks_NK = torch.full((states, tree.depth), MISS)
    for node, children in enumerate(tree.children):
        if not children:
            continue
        ranks = torch.tensor([tree.paths[child - 1][-1] for child in children])
        log_p_NC = (sharp_N1 * torch.tensor([1.0, 0.3, 0.0, -0.2])).log_softmax(1)[:, ranks]
        right_NC = (slope * (log_p_NC - (-log_p_NC.exp()).log1p()) + offset).sigmoid()
        log_p_Nn[:, children] = log_p_NC
        drawn_N1 = torch.rand(states, 1, generator=generator)
        before_NC = right_NC.cumsum(1) - right_NC
        chosen_NC = (before_NC <= drawn_N1) & (drawn_N1 < before_NC + right_NC)
        depth, path = int(tree.depths_n[node]), () if node == 0 else tree.paths[node - 1]
        here_N = (ranks_NK[:, :depth] == torch.tensor(path, dtype=torch.long)).all(dim=1)
        for place, rank in enumerate(ranks.tolist()):
            ranks_NK[here_N & chosen_NC[:, place], depth] = rank
    lengths = [40] * (states // 40)
    return list(log_p_Nn.split(lengths)), list(ranks_NK.split(lengths))


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, -0.8)])
def test_the_calibration_is_found_again(slope, offset):
    log_p, ranks = text_of(TREE, 20_000, 1, slope, offset)
    found = calibrated(TREE, torch.cat(log_p), torch.cat(ranks))
    assert len(found) == 3
    for depth, tolerance in ((0, 0.05), (1, 0.1), (2, 0.2)):  # the deeper, the fewer have the right parent
        assert found[depth] == pytest.approx((slope, offset), abs=tolerance)


def test_without_drafts_to_learn_from_the_heads_are_believed():
    ranks_NK = torch.tensor([[MISS, MISS, MISS]] * 50)
    found = calibrated(TREE, torch.full((50, TREE.num_nodes), -1.0), ranks_NK)
    assert found[1:] == ((1.0, 0.0), (1.0, 0.0))
    assert found[0][1] < -1  # never right


# ------------------------------------------------------------------------------ the clock


def rule_of(costs: Costs, tree: Tree = TREE) -> Adaptive:
    pace = tuple(1 / ms for ms in costs.plain_ms)
    order = tuple(range(1, tree.num_nodes))
    return Adaptive(
        order, costs.sizes, ((1.0, 0.0),) * tree.depth, costs.batches, costs.cost_ms, costs.plain_ms, pace, 0
    )


FLAT = Costs((1, 2, 4), (1, 4, 9), ((10.0, 12.0, 20.0), (11.0, 14.0, 30.0), (12.0, 18.0, 50.0)), (9.0, 10.0, 11.0))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", FLAT.sizes)
def test_always_the_same_part_is_replays_count_times_the_cost(size, batch):
    rule, (log_p, ranks) = rule_of(FLAT), text_of(TREE, 400, 2, 1.0, 0.0)
    part = Tree(TREE.paths[: size - 1])
    passes = walk_all([part.accepted(ranks_SK) for ranks_SK in ranks]).acceptance
    text = Walkable.of(rule, TREE, log_p, ranks)
    found = clocked(text, replace(rule, batches=(1,), cost_ms=(FLAT.cost_ms[0],)), batch, lambda tokens, N: size)
    ms = FLAT.cost_ms[0][FLAT.sizes.index(size)]
    assert found.tok_s == pytest.approx(1000 * passes.emitted / (passes.passes * ms))
    assert (found.plain_share, found.nodes) == (float(size == 1), size)


def truth(text: Walkable) -> Walkable:
    return replace(text, expected_NS=text.emitted_NS.astype(np.float64))


milliseconds = st.lists(st.floats(1, 100), min_size=3, max_size=3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), milliseconds, st.sampled_from([1, 4]))
def test_who_knows_the_truth_is_never_slower_than_plain_steps(seed, costs, batch):
    """With their pace every choice gains at least what a plain step gains, which is nothing."""
    rule = replace(rule_of(FLAT), batches=(1,), cost_ms=(tuple(costs),), plain_ms=(costs[0],), pace=(1 / costs[0],))
    text = truth(Walkable.of(rule, TREE, *text_of(TREE, 200, seed, 1.0, 0.0)))
    assert clocked(text, rule, batch).tok_s >= 1000 / costs[0] * (1 - 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.floats(0.2, 8), st.floats(0.1, 1.5))
def test_who_knows_the_truth_does_not_lose_to_the_whole_tree(seed, slope, a_node):
    """In the long run: where a walk stops, other states come after a part than after the whole tree."""
    costs = (tuple(10 + a_node * size**slope / 9 ** (slope - 1) for size in FLAT.sizes),)
    rule = replace(rule_of(FLAT), batches=(1,), cost_ms=costs, plain_ms=(10.0,), pace=(0.1,))
    text = truth(Walkable.of(rule, TREE, *text_of(TREE, 2000, seed, 1.0, 0.0)))
    always = clocked(text, rule, 1, lambda tokens, N: 9).tok_s
    for _ in range(3):
        rule = replace(rule, pace=(clocked(text, rule, 1).tok_s / 1000,))
    assert clocked(text, rule, 1).tok_s >= always * 0.999


# ------------------------------------------------------------------------------ costs, and what it is worth


@functools.cache
def machine(name: str) -> CycleModel:
    return CycleModel(instantiate(compose([f"hardware={name}"]).hardware), KIMI_K25)


with torch.device("meta"):
    K25_HEADS = RecurrentHeads(7168, 3, 3584)


def test_a_part_costs_its_pass_and_the_drafting_of_the_whole_tree():
    passes, costs = machine("rtx_pro_6000_x8"), Costs.of(machine("rtx_pro_6000_x8"), K25_HEADS, 16384, 9)
    assert (costs.batches, costs.sizes) == (BATCHES, (1, 2, 4, 8, 9))
    whole, of_four = (passes.drafting(K25_HEADS, 16384, nodes).ms for nodes in (9, 4))
    assert costs.plain_ms[0] == pytest.approx(1000 / 82)
    assert costs.cost_ms[0][0] == pytest.approx(1000 / 82 + whole)
    assert costs.cost_ms[0][2] == pytest.approx(30.0 + whole - of_four)  # as measured, drafting included
    many = passes.drafting(K25_HEADS, 16384, 9, 32)
    assert costs.cost_ms[5][0] == pytest.approx(costs.plain_ms[5] + many.ms)
    assert many.flops == 32 * passes.drafting(K25_HEADS, 16384, 9).flops and many.ms > whole


@pytest.mark.parametrize("hardware", ["rtx_pro_6000_x8", "b200_nvl8", "h200_x8"])
@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (2.0, 1.0), (0.5, -2.0)], ids=["good", "better", "bad"])
def test_on_held_out_text_it_is_never_slower_than_none_or_always(hardware, slope, offset):
    """Within 2%: the held-out text is another sample of the same kind."""
    tree = Tree([[0], [1], [0, 0], [0, 0, 0]])
    costs = Costs.of(machine(hardware), K25_HEADS, 16384, tree.num_nodes)
    rule = fitted(tree, *text_of(tree, 2000, 3, slope, offset), costs)
    priced = Priced.of(rule, tree, *text_of(tree, 2000, 4, slope, offset), of_target=True)
    for row in priced.rows:
        chosen = row.none_tok_s if row.adaptive is None else row.adaptive.tok_s
        assert chosen >= 0.98 * row.none_tok_s
        assert chosen >= 0.98 * row.always.tok_s
    assert len(priced.text().splitlines()) == 7
    assert Adaptive.from_json(rule.as_json(), tree) == rule


def test_where_it_pays_it_drafts_and_where_not_it_does_not():
    tree = Tree.chain(2)
    costs = Costs((1, 8, 32), (1, 2, 3), ((10.1, 10.2, 10.3), (10.1, 12.0, 14.0), (10.1, 30.0, 50.0)), (10.0,) * 3)
    good, bad = (fitted(tree, *text_of(tree, 800, 5, slope, offset), costs) for slope, offset in ((1, 1), (1, -9)))
    assert (good.draft_up_to, bad.draft_up_to) == (8, 0)
    assert good.pace[0] * 10 > good.pace[1] * 10 >= PAYS_FROM > good.pace[2] * 10
    row = Priced.of(good, tree, *text_of(tree, 800, 6, 1, 1), of_target=False).rows
    assert [each.adaptive is None for each in row] == [False, False, True]
    assert "at most 8 requests" in adaptive_note(good, "cpu") and "never pays" in adaptive_note(bad, "cpu")


def test_a_batch_that_pays_behind_one_that_does_not_is_left_alone():
    tree = Tree.chain(1)
    costs = Costs((1, 8), (1, 2), ((11.0, 30.0), (10.1, 10.2)), (10.0, 10.0))
    assert fitted(tree, *text_of(tree, 800, 5, 1, 1), costs).draft_up_to == 0
