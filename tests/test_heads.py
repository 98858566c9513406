import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import DraftVocabulary, ResidualHeads

OPTIONS = [
    {},
    {"bias": False},
    {"num_blocks": 2},
    {"own_lm_head": True, "draft_vocab_size": 6},
    {"own_lm_head": True, "draft_vocab_size": 6, "bias": False, "num_blocks": 2},
]
no_path = torch.zeros(5, 3, dtype=torch.long)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_at_step_0_every_head_equals_the_target(options):
    heads = ResidualHeads(8, 3, **options)
    hidden_ND, lm_head_MD = torch.randn(5, 8), torch.randn(6, 8)
    heads.init_lm_heads(lm_head_MD)
    features_KND = heads(hidden_ND, no_path)
    lm_heads_KMD = heads.with_lm_head(lm_head_MD, lambda lm_head: lm_head.expand(3, -1, -1))
    assert len(features_KND) == len(lm_heads_KMD) == 3
    for features_ND, own_MD in zip(features_KND, lm_heads_KMD, strict=True):
        assert torch.equal(features_ND @ own_MD.T, hidden_ND @ lm_head_MD.T)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_parameters_are_distinct_and_learn(options):
    heads = ResidualHeads(8, 3, **options)
    lm_head_MD = torch.randn(6, 8)
    heads.init_lm_heads(lm_head_MD)
    parameters = list(heads.parameters())
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    assert len(parameters) == 3 * heads.num_blocks * (1 + heads.bias) + heads.own_lm_head
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    features_KND = heads(torch.randn(5, 8), no_path)
    logits_KNM = heads.with_lm_head(lm_head_MD, lambda lm_head: features_KND @ lm_head.mT)
    logits_KNM.logsumexp(-1).sum().backward()
    optimizer.step()
    # every head's part of it, too
    changed = [(new - old).flatten(1 if new.ndim == 3 else 0) for new, old in zip(parameters, before, strict=True)]
    assert all((change.abs().sum(-1) > 0).all() for change in changed)
    if heads.lm_heads is not None:
        assert not torch.equal(heads.lm_heads.weight[0], lm_head_MD)
    assert not any("bias" in name for name, _ in heads.named_parameters()) or heads.bias


def test_own_lm_heads_need_their_size():
    with pytest.raises(ValueError, match="own_lm_head=true needs draft_vocab_size"):
        ResidualHeads(8, own_lm_head=True)


def test_residual_blocks_are_summed_as_written():
    heads = ResidualHeads(hidden_size=4, num_heads=2, num_blocks=2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    x_ND = torch.randn(3, 4)
    state = heads.state_dict()
    for k, features_ND in enumerate(heads(x_ND, torch.zeros(3, 2, dtype=torch.long))):
        y_ND = x_ND
        for i in range(2):
            inner = y_ND @ state[f"heads.{k}.{i}.linear.weight"].T + state[f"heads.{k}.{i}.linear.bias"]
            y_ND = y_ND + inner * inner.sigmoid()
        torch.testing.assert_close(features_ND, y_ND)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.data())
def test_the_draft_vocabulary_holds_the_most_frequent_tokens(counts, data):
    counts_V = torch.tensor(counts)
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = DraftVocabulary.most_frequent(counts_V, size)
    inside = vocabulary.token_ids_M.tolist()
    outside = sorted(set(range(len(counts))) - set(inside))
    assert len(inside) == size
    assert not outside or min(counts[i] for i in inside) >= max(counts[i] for i in outside)
    ids = torch.tensor([*range(len(counts)), IGNORE])
    drafts = vocabulary.to_draft(ids)
    assert drafts[-1] == IGNORE
    assert all(drafts[i] == IGNORE for i in outside)
    assert vocabulary.to_target(drafts[inside]).tolist() == inside


def test_more_draft_tokens_than_were_seen_are_filled_with_the_lowest_ids():
    counts_V = torch.zeros(200, dtype=torch.long)
    counts_V[100:150] = 1
    assert DraftVocabulary.most_frequent(counts_V, 100).token_ids_M.tolist() == [*range(50), *range(100, 150)]


@pytest.mark.parametrize("ids", [[], [0, 0, 0], [3, 2], [0, 10]])
def test_a_damaged_vocabulary_is_refused(ids):
    with pytest.raises(ValueError, match="draft vocabulary"):
        DraftVocabulary(torch.tensor(ids, dtype=torch.long), vocab_size=10)


@pytest.mark.parametrize("size", [0, 201])
def test_a_vocabulary_of_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match=f"draft_vocab_size={size}"):
        DraftVocabulary.most_frequent(torch.ones(200, dtype=torch.long), size)
