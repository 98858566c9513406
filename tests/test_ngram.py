"""Every training-free predictor against the plainest form of what it says it does."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.data.texts import Text
from medusa_k25.ngram.corpus import best_corpus_drafts, choose_corpus, places_in
from medusa_k25.ngram.engine import BREADTH_STEP, PADDING, TRIE_DEPTH, Corpus, EngineNgram, draft_tree, suffix_order
from medusa_k25.ngram.lookup import Lookup
from medusa_k25.replay import walk_all

IDS = st.lists(st.integers(0, 3), min_size=2, max_size=40)


def text_of(ids: Sequence[int], start: int = 0) -> Text:
    return Text(torch.tensor(ids, dtype=torch.int32), start, "", None, None, 0.0)


@st.composite
def repetitive(draw: st.DrawFn) -> list[int]:
    """Ids of few or many tokens; stretches come again, some at once, with other tokens after them."""
    random = draw(st.randoms(use_true_random=False))
    vocabulary = draw(st.sampled_from([2, 4, 25]))
    ids = [random.randrange(vocabulary) for _ in range(random.randint(2, 30))]
    for _ in range(random.randint(0, 6)):
        first = random.randrange(len(ids))
        again = ids[first : first + random.randint(1, 22)]
        ids += again * random.choice([1, 1, 1, 2, 4]) + [random.randrange(vocabulary)]
    return ids[:120]


@st.composite
def texts(draw: st.DrawFn) -> Text:
    ids = draw(repetitive())
    return text_of(ids, draw(st.integers(0, len(ids) - 2)))


def in_common(before: Sequence[int], chain: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(before, chain, strict=False)) if a != b), min(len(before), len(chain))
    )


def plain_lookup(text: Text, num_drafts: int, longest: int | None) -> list[tuple[int, int]]:
    """(accepted, match) a state: every earlier position is compared, token by token."""
    ids, found = text.ids_T.tolist(), []
    for root in range(text.start, len(ids) - 1):
        matches = [(in_common(ids[j::-1], ids[root::-1]), j) for j in range(root)]
        match, last = max([(min(match, longest or match), j) for match, j in matches], default=(0, 0))
        draft = ids[last + 1 : root + 1][:num_drafts] if match else []
        found.append((in_common(draft, ids[root + 1 :]), match))
    return found


@given(st.lists(texts(), max_size=4), st.integers(0, 6), st.sampled_from([None, 1, 2, 4]))
def test_lookup_is_the_plain_loop(some, num_drafts, longest):
    found = Lookup("lookup", longest).accepted_and_matches(some, num_drafts + 1)
    assert len(found) == len(some)
    for text, (accepted_S, match_S) in zip(some, found, strict=True):
        assert list(zip(accepted_S.tolist(), match_S.tolist(), strict=True)) == plain_lookup(text, num_drafts, longest)


def test_a_lookup_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 token, got longest=0"):
        Lookup("lookup", 0)


# The engine's algorithm in terms of strings alone: which are there, and how lately each was seen.
Seen = dict[tuple[int, ...], float]


def followers(seen: Seen, string: tuple[int, ...]) -> list[int]:
    """The tokens that followed it, the latest first."""
    longer = {key: when for key, when in seen.items() if len(key) == len(string) + 1 and key[:-1] == string}
    return [key[-1] for key in sorted(longer, key=longer.__getitem__, reverse=True)]


def plain_tree(anchors: Sequence[tuple[int, ...]], budget: int, follow: Callable[[tuple[int, ...]], list[int]]) -> set:
    """The drafted paths: breadth first from one anchor after the other."""
    paths: list[tuple[int, ...]] = []
    for anchor in anchors:
        queue = deque[tuple[tuple[int, ...], float]]([((), 10 - len(anchor) * BREADTH_STEP)])
        while queue and len(paths) < budget:
            path, breadth = queue.popleft()
            for token in islice(follow((*anchor, *path)), max(1, int(breadth + 1e-9))):
                if len(paths) < budget:
                    longer = (*path, token)
                    if longer not in paths:
                        paths.append(longer)
                    queue.append((longer, breadth - BREADTH_STEP))
    return {*paths} | ({(PADDING,)} if len(paths) < budget else set())


def suffixes(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Of the last TRIE_DEPTH tokens, the longest first."""
    return [tuple(ids[-n:]) for n in range(min(TRIE_DEPTH, len(ids)), 0, -1)]


def accepted_of(paths: set[tuple[int, ...]], following: Sequence[int]) -> int:
    return max([0, *(len(path) for path in paths if tuple(following[: len(path)]) == path)])


def plain_corpus(answers: Sequence[Sequence[int]], budget: int) -> Callable[[Sequence[int]], set]:
    joined = [token for answer in answers for token in (*answer, -1)]
    seen: dict[tuple[int, ...], list[int]] = {}
    for begin in range(len(joined)):
        for stop in range(begin + 1, min(begin + 60, len(joined)) + 1):
            seen.setdefault(tuple(joined[begin:stop]), []).append(stop)
    latest: Seen = {string: ends[-1] for string, ends in seen.items() if string[-1] != -1}

    def draft(context: Sequence[int]) -> set:
        anchors = [suffix for suffix in suffixes(context) if suffix in seen]
        # those that always stood in a longer one are one with it
        states = [a for i, a in enumerate(anchors) if i == 0 or len(seen[a]) > len(seen[anchors[i - 1]])]
        return plain_tree(states, budget, lambda string: followers(latest, string))

    return draft


@settings(max_examples=40, deadline=None)
@given(st.lists(repetitive(), min_size=1, max_size=3), repetitive(), st.integers(1, 12), st.data())
def test_a_corpus_drafts_as_a_list_of_its_strings_does(answers, ids, budget, data):
    answer = data.draw(st.sampled_from(answers))
    text = text_of(answer[: data.draw(st.integers(0, len(answer)))] + ids)
    corpus = Corpus([torch.tensor(answer) for answer in answers])
    assert corpus.num_tokens == sum(map(len, answers)) + len(answers) - 1
    draft, ids = plain_corpus(answers, budget), text.ids_T.tolist()
    expected = [accepted_of(draft(ids[: root + 1]), ids[root + 1 :]) for root in range(text.start, len(ids) - 1)]
    assert EngineNgram("table", corpus).accepted([text], budget + 1)[0].tolist() == expected
    # what was drafted with more is what a smaller budget would have drafted
    corpus.places(text, 20)
    assert EngineNgram("table", corpus).accepted([text], budget + 1)[0].tolist() == expected


def plain_trie_walk(some: Sequence[Text], budget: int, shared: bool) -> list[list[int]]:
    """Accepted drafts pass by pass."""
    seen, clock, counts = dict[tuple[int, ...], float](), 0, []
    for text in some:
        if not shared:
            seen = {}
        ids, root, accepted = text.ids_T.tolist(), text.start, []
        known = {suffix for suffix in suffixes(ids[: root + 1]) if suffix in seen}
        while root < len(ids) - 1:
            anchors = sorted(known, key=len, reverse=True)
            count = accepted_of(plain_tree(anchors, budget, partial(followers, seen)), ids[root + 1 :])
            tail = ids[: root + 1][-TRIE_DEPTH:]
            for begin in range(len(tail)):
                for stop in range(begin + 1, len(tail) + 1):
                    clock += 1
                    seen[tuple(tail[begin:stop])] = clock
            accepted.append(count)
            for token in ids[root + 1 : root + 2 + count]:
                root += 1
                longer = {(*string, token) for string in known if len(string) < TRIE_DEPTH} | {(token,)}
                known = {string for string in longer if string in seen}
        counts.append(accepted)
    return counts


@settings(max_examples=40, deadline=None)
@given(st.lists(texts(), min_size=1, max_size=3), st.integers(1, 12), st.booleans())
def test_the_own_text_is_drafted_from_as_a_list_of_its_strings_is(some, budget, shared):
    expected = plain_trie_walk(some, budget, shared)
    accepted = EngineNgram("own", None, 0, shared).accepted(some, budget + 1)
    for text, accepted_S, counts in zip(some, accepted, expected, strict=True):
        assert len(accepted_S) == text.num_states
        state = 0
        for count in counts:
            assert accepted_S[state] == count
            state += count + 1


def test_corpus_and_own_text_by_hand():
    #               0  1  2  3  4  5  6  7  8  9
    text = text_of([9, 5, 6, 7, 8, 5, 6, 7, 8, 4], start=1)
    corpus = Corpus([torch.tensor([6, 7, 3]), torch.tensor([8, 4])])
    # the corpus knows 6 7 and 8 4
    assert EngineNgram("table", corpus).accepted([text], 4)[0].tolist() == [0, 1, 0, 0, 0, 1, 0, 1]
    # the own text, when its second 5 is the root: 6 7 8 and no more, for that 5 will be inserted after this pass
    own = EngineNgram("own", None, 0).accepted([text], 4)[0]
    assert own.tolist() == [0, 0, 0, 0, 3, 0, 0, 0]
    both = EngineNgram("both", corpus, 1).accepted([text], 4)[0]
    assert both.tolist() == [0, 1, 0, 0, 2, 0, 0, 1]


def test_the_later_answer_of_the_corpus_comes_first_and_separators_are_never_drafted():
    text = text_of([1, 5, 6])
    for answers, found in (([[5, 6], [5, 7]], 0), ([[5, 7], [5, 6]], 1)):
        corpus = Corpus([torch.tensor(answer) for answer in answers])
        assert EngineNgram("table", corpus).accepted([text], 2)[0].tolist() == [0, found]
        assert EngineNgram("table", corpus).accepted([text], 3)[0].tolist() == [0, 1]
    corpus = Corpus([torch.tensor([5]), torch.tensor([6])])
    assert EngineNgram("table", corpus).accepted([text], 9)[0].tolist() == [0, 0]


def test_a_tree_narrows_with_the_match_and_with_its_depth():
    def ten(node: int) -> list[tuple[int, int]]:
        return [(token, node + 1) for token in range(10)]

    def widths(matched: int) -> list[int]:
        """Children of the root, of its first child, of that one's, ..."""
        tree, node, found = draft_tree([(0, matched)], ten, 63), 0, []
        while tree[node]:
            found.append(len(tree[node]))
            node = tree[node][0]
        return found

    # (17 - matched) * 9 / 17 + 1, and 9 / 17 less with each step down
    assert widths(1) == [9, 8]
    assert widths(10) == [4, 4, 3]
    assert widths(14)[:2] == [2, 2]
    assert widths(17) == widths(18) == [1] * 63


def test_nodes_that_stay_unused_draft_the_padding_token():
    assert EngineNgram("own", None, 0).accepted([text_of([1, 0, 0])], 2)[0].tolist() == [1, 0]


@given(IDS, st.integers(1, 50))
def test_suffixes_are_sorted_to_the_depth_that_is_asked_for(ids, depth):
    order = suffix_order(torch.tensor(ids, dtype=torch.int32).numpy(), depth).tolist()
    assert sorted(order) == list(range(len(ids)))
    assert sorted(ids[i : i + depth] for i in order) == [ids[i : i + depth] for i in order]


def test_what_no_server_does_is_refused():
    with pytest.raises(ValueError, match="a corpus needs answers"):
        Corpus([])
    with pytest.raises(ValueError, match="expected corpus_drafts=0 where there is no corpus"):
        EngineNgram("table", None)
    with pytest.raises(ValueError, match="at most 64 nodes, got 65"):
        EngineNgram("own", None, 0).accepted([], 65)


def random_texts(count: int, seed: int, words: int = 12) -> list[Text]:
    """Texts of phrases: a few phrases come often."""
    phrases = torch.randint(1, 500, (words, 5), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    return [text_of(phrases[torch.randint(words, (8,), generator=generator)].flatten().tolist()) for _ in range(count)]


def acceptance(predictor: EngineNgram, some: Sequence[Text], num_nodes: int) -> float:
    return walk_all(predictor.accepted(some, num_nodes)).acceptance.length


@given(st.sets(st.integers(0, 20)), st.lists(st.integers(0, 20)))
def test_places_of_what_a_sorted_array_holds(held: set[int], values: list[int]) -> None:
    sorted_U = np.array(sorted(held), dtype=np.int64)
    assert sorted_U[places_in(sorted_U, np.array(values, dtype=np.int64))].tolist() == sorted(held & {*values})


def test_the_corpus_holds_what_calibration_text_repeats_within_its_limit():
    useful, useless = random_texts(6, seed=1), [text_of(list(range(1000 + i, 1060 + i))) for i in range(20)]
    calibration = random_texts(4, seed=2)
    chosen = choose_corpus([*useless[:10], *useful, *useless[10:]], calibration, max_tokens=6 * 41)
    assert {id(text) for text in chosen} == {id(text) for text in useful}
    everything = choose_corpus([*useful, *useless], calibration, max_tokens=10**6)
    assert {id(text) for text in everything[-6:]} == {id(text) for text in useful}  # the best are read last
    assert len(everything) == 26
    assert len(choose_corpus(useful, calibration, max_tokens=40)) == 1
    # a second answer with the same phrases is worth less than one with other phrases
    twice = [useful[0], replace(useful[0]), *random_texts(1, seed=9)]
    chosen = choose_corpus(twice, calibration, max_tokens=81)
    assert len({tuple(text.ids_T.tolist()) for text in chosen}) == 2


def test_a_corpus_of_nothing_is_refused():
    some = random_texts(2, seed=1)
    for train, calibration, message in (
        ([], some, "no answer in the train split"),
        (some, [], "no answer in the calibration split"),
        (some, some, "no answer fits a corpus of 39 tokens: the shortest has 40"),
        ([text_of([1, 2**22])], some, "token id 4,194,304 is too large"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_corpus(train, calibration, max_tokens=39)


def test_the_drafts_are_split_as_calibration_text_wants_it():
    calibration = random_texts(3, seed=2)
    knowing, ignorant = Corpus([t.ids_T for t in random_texts(20, seed=1)]), Corpus([torch.tensor([600, 601])])
    assert best_corpus_drafts(ignorant, calibration, 9) == 1
    best = best_corpus_drafts(knowing, calibration, 9)
    lengths = [acceptance(EngineNgram("", knowing, b), calibration, 9) for b in range(1, 9)]
    assert lengths[best - 1] == max(lengths)
    assert best > 1
