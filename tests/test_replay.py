import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.data.labels import IGNORE
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.metrics import MISS
from medusa_k25.ngram import ngram_accepted
from medusa_k25.replay import Acceptance, best_tree, future_ranks, interval, replay, walk
from medusa_k25.tree import Tree


def test_a_walk_by_hand():
    # an answer of 7 tokens: prefill emits the first, six follow
    # pass 1 accepts 2 (emits 3), pass 2 accepts 0 (emits 1), pass 3 accepts 5, but only 2 tokens are left
    assert walk([2, 9, 9, 0, 5, 9]) == Acceptance(answers=1, passes=3, emitted=6, accepted={2: 2, 0: 1})
    assert walk([2, 9, 9, 0, 5, 9]).length == 2.0


def test_a_draft_that_is_the_last_token_leaves_no_place_for_the_targets_own():
    assert walk([1]) == Acceptance(1, 1, 1, {1: 1})
    assert walk([0]) == Acceptance(1, 1, 1, {0: 1})


def test_an_answer_of_one_token_needs_no_pass():
    assert walk([]).passes == 0


@given(st.lists(st.integers(0, 6), max_size=40))
def test_every_token_after_the_first_is_emitted_once(accepted):
    acceptance = walk(accepted)
    assert acceptance.emitted == len(accepted)
    assert acceptance.passes == sum(acceptance.accepted.values())
    assert acceptance.passes <= acceptance.emitted


@given(st.lists(st.lists(st.sampled_from([0, 1, MISS]), min_size=3, max_size=3), max_size=20))
def test_replay_equals_a_token_by_token_server(rows):
    """The obvious server: draft every path of the tree, keep the longest that the text holds."""
    tree = Tree([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
    S = len(rows)
    ranks_SK = torch.tensor(rows, dtype=torch.long).view(S, 3)
    for s in range(S):  # labels beyond the answer's end do not exist
        ranks_SK[s, S - s :] = MISS
    passes = state = 0
    while state < S:
        longest = max([0, *(len(p) for p in tree.paths if tuple(ranks_SK[state, : len(p)].tolist()) == p)])
        state += min(longest + 1, S - state)
        passes += 1
    assert replay([ranks_SK], tree).passes == passes


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_ranks_are_those_of_each_heads_own_logits(own, bias):
    generator = torch.Generator().manual_seed(0)
    S, K, D = 6, 3, 8
    vocabulary = DraftVocabulary(torch.tensor([0, 2, 3, 5, 8, 9]), vocab_size=10)
    heads = ResidualHeads(D, K, bias=bias, own_lm_head=own, draft_vocab_size=6)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=generator)
    lm_head_MD = torch.randn(6, D, generator=generator)
    hidden_SD = torch.randn(S, D, generator=generator)
    future_SK = torch.randint(-1, 10, (S, K + 1), generator=generator)
    future_SK[future_SK < 0] = IGNORE
    ranks_SK = future_ranks(heads, lm_head_MD, vocabulary, hidden_SD, future_SK)
    lm_heads = list(heads.state_dict()["lm_heads.weight"]) if own else [lm_head_MD] * K
    for k, features_SD in enumerate(heads(hidden_SD, future_SK[:, :-1])):
        order_SM = vocabulary.to_target((features_SD @ lm_heads[k].T).argsort(dim=1, descending=True)).tolist()
        labels = future_SK[:, k + 1].tolist()
        expected = [order.index(y) if y in order else MISS for order, y in zip(order_SM, labels, strict=True)]
        assert ranks_SK[:, k].tolist() == expected


def test_the_best_tree_is_chosen_on_all_answers_together():
    answers = [torch.tensor([[0, 1], [0, 1]]), torch.tensor([[2, 0]]), torch.tensor([[3, 3]] * 9)]
    assert best_tree(answers, 3, max_width=3) == Tree([[0], [0, 1]])
    assert best_tree(answers, 3, max_width=4) == Tree([[3], [3, 3]])
    with pytest.raises(ValueError, match="no answer in the calibration split"):
        best_tree([], 3, 3)


def test_acceptances_add_up():
    both = walk([2, 9, 9, 0, 5, 9]) + walk([1])
    assert both == Acceptance(2, 4, 7, {0: 1, 1: 1, 2: 2})
    assert both.passes_saved == 1 - 4 / 7


def test_the_interval_encloses_the_mean_and_shrinks_with_more_answers():
    walks = [walk([i % 3] * 12) for i in range(30)]
    mean = sum(walks, Acceptance()).length
    low, high = interval(walks)
    assert low < mean < high
    wider_low, wider_high = interval(walks[:6])
    assert high - low < wider_high - wider_low


#        position: 0  1  2  3  4  5  6  7  8
LOOKUP = torch.tensor([5, 6, 7, 8, 5, 6, 7, 9, 5])


def test_ngram_lookup_by_hand():
    # answer from position 4 on. Root 5: followed by 6 7 8 before; the text goes on 6 7 9: two drafts accepted.
    # Root 6 (after 5): 7 8, one accepted. Root 7: 8 is wrong. Root 9: never seen, nothing drafted.
    assert ngram_accepted(LOOKUP, first_root=4, num_drafts=3).tolist() == [2, 1, 0, 0]


def test_ngram_lookup_prefers_the_longest_and_then_the_latest_match():
    ids_T = torch.tensor([1, 2, 3, 9, 2, 4, 1, 2, 3])
    # root at position 7: suffix (1, 2) was followed by 3; the later, shorter match (2,) by 4
    assert ngram_accepted(ids_T, first_root=7, num_drafts=1).tolist() == [1]
    assert ngram_accepted(ids_T, first_root=7, num_drafts=1, longest=1).tolist() == [0]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 5), st.data())
def test_ngram_lookup_never_drafts_what_is_not_known_yet(ids, num_drafts, data):
    ids_T = torch.tensor(ids)
    first_root = data.draw(st.integers(0, len(ids) - 2))
    accepted = ngram_accepted(ids_T, first_root, num_drafts).tolist()
    assert len(accepted) == len(ids) - 1 - first_root
    for s, count in enumerate(accepted):
        root = first_root + s
        assert count <= min(num_drafts, len(ids) - 1 - root)
        changed = ids_T.clone()
        changed[root + 1 :] = 99  # an unknown future: nothing can be accepted, whatever was drafted
        assert ngram_accepted(changed, root, num_drafts)[0] == 0
