import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.data.labels import IGNORE
from medusa_k25.metrics import MISS, label_ranks, top_accuracy, topk_ids


def logits_and_head(values, N, V, seed):
    """Logits with many ties, and features and lm_head whose product they are exactly (lm_head = identity)."""
    g = torch.Generator().manual_seed(seed)
    return torch.tensor(values)[torch.randint(0, len(values), (N, V), generator=g)], torch.eye(V)


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=6),
    N=st.integers(1, 7),
    V=st.integers(1, 40),
    rows=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_ranks_and_best_tokens_agree_on_ties(values, N, V, rows, seed):
    logits_NV, lm_head_VD = logits_and_head(values, N, V, seed)
    ids_NV = torch.tensor([sorted(range(V), key=lambda j: (-row[j], j)) for row in logits_NV.tolist()])
    for k in {1, (V + 1) // 2, V}:
        best_NK = topk_ids(logits_NV, k)
        assert torch.equal(best_NK, ids_NV[:, :k])
        for c in range(k):
            assert label_ranks(logits_NV, lm_head_VD, best_NK[:, c], rows).tolist() == [c] * N


def test_large_rows_with_ties_at_the_cut():
    logits_NV, _ = logits_and_head([0.0, 1.0, 5.0], 3, 5000, 0)
    best_NK = topk_ids(logits_NV, 8)
    for row, best in zip(logits_NV, best_NK, strict=True):
        assert best.tolist() == (row == 5).nonzero()[:8, 0].tolist()


def test_random_logits_rank_as_sorted():
    g = torch.Generator().manual_seed(0)
    features_ND, lm_head_VD = torch.randn(300, 8, generator=g), torch.randn(700, 8, generator=g)
    labels_N = torch.randint(0, 700, (300,), generator=g)
    labels_N[::7] = IGNORE
    order_NV = (features_ND @ lm_head_VD.T).argsort(dim=1, descending=True)
    expected_N = (order_NV == labels_N[:, None]).int().argmax(dim=1).masked_fill(labels_N == IGNORE, MISS)
    ranks_N = label_ranks(features_ND, lm_head_VD, labels_N, rows=64)
    assert ranks_N.dtype == torch.int64
    assert torch.equal(ranks_N, expected_N)


def test_broken_states_are_misses_not_hits():
    features_ND = torch.tensor([[1.0, 0.0], [torch.nan, 0.0]])
    assert label_ranks(features_ND, torch.eye(2), torch.tensor([0, 0])).tolist() == [0, MISS]


def test_no_positions():
    assert label_ranks(torch.empty(0, 4), torch.ones(3, 4), torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert label_ranks(torch.ones(2, 4), torch.ones(3, 4), torch.tensor([IGNORE] * 2)).tolist() == [MISS] * 2


def test_labels_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="label 3 is outside the 3 rows"):
        label_ranks(torch.ones(1, 4), torch.ones(3, 4), torch.tensor([3]))


def test_accuracy_counts_unknown_tokens_as_misses_and_drops_positions_without_a_label():
    ranks_KN = torch.tensor([[0, 1, 4, MISS, 0], [2, 0, MISS, MISS, MISS]])
    counted_KN = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], dtype=torch.bool)
    hits_KS, count_K = top_accuracy(ranks_KN, counted_KN)
    assert hits_KS.tolist() == [[1, 2, 2, 2, 3], [1, 1, 2, 2, 2]]
    assert count_K.tolist() == [4, 2]
    parts = [top_accuracy(ranks_KN[:, part], counted_KN[:, part]) for part in (slice(0, 2), slice(2, 5))]
    assert torch.equal(parts[0][0] + parts[1][0], hits_KS)
    assert torch.equal(parts[0][1] + parts[1][1], count_K)
