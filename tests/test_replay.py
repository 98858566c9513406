import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from medusa_k25.data.labels import IGNORE
from medusa_k25.data.texts import Text
from medusa_k25.heads import DraftVocabulary, ResidualHeads, Speculator
from medusa_k25.metrics import MISS
from medusa_k25.ngram.lookup import Lookup
from medusa_k25.replay import (
    Acceptance,
    Resampling,
    between,
    fastest_tree,
    future_ranks,
    grow,
    grow_where_walks_stop,
    replay,
    walk,
    walk_all,
)
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
    assert walk([]) == Acceptance()


@given(st.lists(st.integers(0, 6), max_size=40))
def test_every_token_after_the_first_is_emitted_once(accepted):
    acceptance = walk(accepted)
    assert acceptance.emitted == len(accepted)
    assert acceptance.passes == sum(acceptance.accepted.values())
    assert acceptance.passes <= acceptance.emitted


@given(st.lists(st.lists(st.integers(0, 6), max_size=30), max_size=8))
def test_all_texts_at_once_are_walked_as_one_by_one(answers):
    passes = walk_all([torch.tensor(accepted, dtype=torch.long) for accepted in answers])
    walks = [walk(accepted) for accepted in answers]
    assert passes.acceptance == sum(walks, Acceptance())
    emitted_I, passes_I = passes.by_text()
    assert emitted_I.tolist() == [one.emitted for one in walks]
    assert passes_I.tolist() == [one.passes for one in walks]
    for i, one in enumerate(walks):
        assert passes.where(passes.text_P == i).acceptance == one
    # every pass starts where the one before it stopped
    for i, accepted in enumerate(answers):
        own = passes.where(passes.text_P == i)
        ends = (own.state_P + own.emitted_P).tolist()
        assert own.state_P.tolist() + ends[-1:] == [0, *ends] if accepted else not ends


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
    ranks_SK = future_ranks(Speculator(heads, vocabulary, lm_head_MD), hidden_SD, future_SK)
    lm_heads = list(heads.state_dict()["lm_heads.weight"]) if own else [lm_head_MD] * K
    for k, features_SD in enumerate(heads(hidden_SD, future_SK[:, :-1])):
        order_SM = vocabulary.to_target((features_SD @ lm_heads[k].T).argsort(dim=1, descending=True)).tolist()
        labels = future_SK[:, k + 1].tolist()
        expected = [order.index(y) if y in order else MISS for order, y in zip(order_SM, labels, strict=True)]
        assert ranks_SK[:, k].tolist() == expected


def test_the_fastest_tree_weighs_what_it_accepts_against_what_its_pass_takes():
    answers = [torch.tensor([[0, 0], [0, 0], [1, 0], [0, 0]])]  # 2 nodes: 4 tokens in 2 passes; 4 nodes: in 2, too
    assert fastest_tree(answers, {2: 10.0, 3: 10.1, 4: 30.0}, max_width=3).num_nodes == 3
    assert fastest_tree(answers, {2: 10.0, 3: 20.0, 4: 30.0}, max_width=3) == Tree([[0]])
    assert fastest_tree(answers, {64: 10.0}, max_width=3).num_nodes == 5  # there are no more paths


def test_the_best_tree_is_chosen_on_all_answers_together():
    answers = [torch.tensor([[0, 1], [0, 1]]), torch.tensor([[2, 0]]), torch.tensor([[3, 3]] * 9)]
    assert fastest_tree(answers, {3: 1.0}, max_width=3) == Tree([[0], [0, 1]])
    assert fastest_tree(answers, {3: 1.0}, max_width=4) == Tree([[3], [3, 3]])
    with pytest.raises(ValueError, match="no answer in the calibration split"):
        fastest_tree([], {3: 1.0}, 3)


def test_a_path_counts_where_the_walk_stops():
    # An easy stretch, where both heads are right from every state. As soon as head 1 is drafted, every other of these
    # states is skipped: (0, 0) is right 3 times there, as often as (1,) in the hard text behind, and less than (2,)
    easy, hard = [[0, 0]] * 6, [[1, 5]] * 3 + [[2, 5]] * 4
    ranks_SK = torch.tensor([*easy, *hard, [5, 5], [5, MISS]])
    assert grow([ranks_SK], 5, max_width=3).paths == ((0,), (0, 0), (2,), (1,))
    growth = grow_where_walks_stop([ranks_SK], 5, max_width=3)
    assert growth.paths == ((0,), (2,), (1,), (0, 0))
    assert growth.shares[0] == 6 / 15  # where nothing is drafted yet, every state is one
    assert growth.shares[1] == 4 / 12


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12), min_size=1, max_size=4)
)
def test_each_path_is_the_most_frequent_where_the_walk_before_it_stops(answers):
    ranks = [torch.tensor(rows) for rows in answers]
    growth = grow_where_walks_stop(ranks, 8, max_width=3)
    for i in range(len(growth.paths)):
        stops = []
        for rows in answers:
            state = 0
            while state < len(rows):
                stops.append(rows[state])
                accepted = int(Tree(growth.paths[:i]).accepted(torch.tensor([rows[state]])))
                state += accepted + 1
        counts = Counter(row[:length] for row in stops for length in (1, 2) if max(row[:length]) < 3)
        new = [count for path, count in counts.items() if path not in growth.paths[:i]]
        assert counts[growth.paths[i]] == max(new)
        assert growth.shares[i] == counts[growth.paths[i]] / len(stops)


def test_acceptances_add_up():
    both = walk([2, 9, 9, 0, 5, 9]) + walk([1])
    assert both == Acceptance(2, 4, 7, {0: 1, 1: 1, 2: 2})
    assert both.passes_saved == 1 - 4 / 7


def lengths_by_hand(documents, answers, seed):
    """The plain bootstrap: for every draw a list of documents, for every document all its answers."""
    names = list(dict.fromkeys(documents))
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    for drawn in torch.randint(len(names), (50, len(names)), generator=generator).tolist():
        walks = [walk(a) for i in drawn for name, a in zip(documents, answers, strict=True) if name == names[i]]
        lengths.append(sum(walks, Acceptance()).length)
    return lengths


def test_answers_of_one_document_are_drawn_together():
    documents = ["a", "b", "a", "c", "d", "c"]
    answers = [[0, 3, 0, 0, 1], [2, 0, 0], [0] * 9, [5, 5, 5], [0, 1], [1, 1]]
    passes = walk_all([torch.tensor(accepted) for accepted in answers])
    resampling = Resampling(documents, samples=50, seed=4)
    assert resampling.lengths(passes).tolist() == pytest.approx(lengths_by_hand(documents, answers, seed=4), rel=1e-6)
    low, high = resampling.interval(passes, 9)
    assert low < passes.acceptance.length < high
    assert Resampling(documents, samples=50, seed=4).interval(passes, 9) == (low, high)


def test_the_interval_shrinks_with_more_documents_and_not_with_more_answers_of_one():
    def width(answers, documents):
        resampling = Resampling([str(i % documents) for i in range(answers)])
        passes = walk_all([torch.full((12,), i % documents % 3) for i in range(answers)])
        low, high = resampling.interval(passes, 9)
        return high - low

    assert width(30, 30) < width(6, 6) * 0.6
    assert width(30, 6) == pytest.approx(width(6, 6))


def test_the_difference_of_two_predictors_is_known_better_than_either():
    resampling = Resampling([str(i) for i in range(40)])
    one = walk_all([torch.full((12,), i % 4) for i in range(40)])
    other = walk_all([torch.full((12,), i % 4 + 1) for i in range(40)])
    low, high = between(resampling.lengths(other) - resampling.lengths(one))
    own_low, own_high = resampling.interval(one, 9)
    assert 0 < low < high
    assert high - low < (own_high - own_low) / 2
    assert between(resampling.lengths(one) / resampling.lengths(one)) == (1.0, 1.0)


def test_between_is_the_middle_95_percent():
    assert between(torch.arange(1001.0).flip(0)) == pytest.approx((25, 975))
    assert between(torch.tensor([float("nan"), 2.0, 2.0])) == (2.0, 2.0)  # a draw without a pass says nothing


def test_one_document_says_nothing_about_others():
    passes = walk_all([torch.tensor([1, 1, 1]), torch.tensor([0, 0])])
    assert Resampling(["a", "a"]).interval(passes, 5) == (1.0, 5.0)


def test_sampled_text_tells_what_a_server_accepts_at_its_temperature_and_greedy_text_does_not():
    """The target is a Markov chain of 5 tokens. The drafts below a root are the two likeliest tokens that follow it.

    The server keeps a draft with the probability that the target gives it, else it takes one of the other tokens.
    """
    draws = random.Random(0)
    logits_VV = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    target = logits_VV.softmax(dim=1).tolist()  # at temperature 1
    likeliest = logits_VV.argmax(dim=1).tolist()
    tokens = range(5)

    def drafts(root: int) -> list[int]:
        return [likeliest[root], likeliest[likeliest[root]]]

    def other_than(draft: int, root: int) -> int:
        return draws.choices(tokens, [0.0 if token == draft else target[root][token] for token in tokens])[0]

    emitted, token, num_passes = 0, 0, 30_000
    for _ in range(num_passes):
        for draft in drafts(token):
            kept = draws.random() < target[token][draft]
            token = draft if kept else other_than(draft, token)
            emitted += 1
            if not kept:
                break
        else:
            token = draws.choices(tokens, target[token])[0]
            emitted += 1
    served = emitted / num_passes

    def replayed(next_token: Callable[[int], int]) -> float:
        text = [0]
        while len(text) < 60_000:
            text.append(next_token(text[-1]))
        accepted = [
            0 if drafts(root)[0] != first else 1 if drafts(root)[1] != second else 2
            for root, first, second in zip(text, text[1:], text[2:], strict=False)
        ]
        return walk_all([torch.tensor(accepted)]).acceptance.length

    assert served < 2
    assert replayed(lambda root: draws.choices(tokens, target[root])[0]) == pytest.approx(served, abs=0.02)
    assert replayed(lambda root: likeliest[root]) == pytest.approx(3, abs=1e-3)


#        position: 0  1  2  3  4  5  6  7  8
LOOKUP = torch.tensor([5, 6, 7, 8, 5, 6, 7, 9, 5])


def ngram_accepted(ids_T: Tensor, first_root: int, num_drafts: int, longest: int = 4) -> Tensor:
    """Of the one answer that runs from position `first_root` to the end of `ids_T`: int64 [S]."""
    text = Text(ids_T, first_root, "", None, None, None)
    return Lookup("n-gram lookup", longest).accepted([text], num_drafts + 1)[0]


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
