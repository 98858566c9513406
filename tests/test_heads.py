import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import HEADS, DraftVocabulary


@pytest.mark.parametrize("name", HEADS)
def test_at_step_0_every_head_equals_the_target(name):
    heads = HEADS[name](hidden_size=8, num_heads=3)
    hidden_ND = torch.randn(5, 8)
    features_KND = heads(hidden_ND, torch.zeros(5, 3, dtype=torch.long))
    assert all(torch.equal(features_ND, hidden_ND) for features_ND in features_KND)


@pytest.mark.parametrize("name", HEADS)
def test_all_parameters_are_distinct_and_learn(name):
    heads = HEADS[name](hidden_size=8, num_heads=3)
    parameters = list(heads.parameters())
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):
        heads(torch.randn(5, 8), torch.zeros(5, 3, dtype=torch.long)).square().sum().backward()
        optimizer.step()
    assert all(parameter.abs().sum() > 0 for parameter in parameters)


def test_residual_blocks_are_summed_as_written():
    heads = HEADS["residual"](hidden_size=4, num_heads=2, num_blocks=2)
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
