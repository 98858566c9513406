"""A continuation beside heads: the table, the lookups and what a pass accepts, each against its plain form."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.metrics import MISS
from medusa_k25.ngram.beside import LONGEST, SHORTEST, Beside, continuations, looked_up, own_matches
from medusa_k25.ngram.table import LENGTHS, AnswersTable
from medusa_k25.tree import Tree
from tests.beside import AHEAD, VOCAB, besides, repeating, tables, tokens_of
from tests.test_ngram import in_common, text_of, texts


def ids_of(answers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [torch.tensor(answer, dtype=torch.int32) for answer in answers]


def plain_continuation(answers: Sequence[Sequence[int]], gram: tuple[int, ...], ahead: int) -> list[int] | None:
    """Occurrences in the order in which they stand; those stay that go on as most do, token after token."""
    n = len(gram)
    places = [
        (number, at)
        for number, answer in enumerate(answers)
        for at in range(n, len(answer) - ahead + 1)
        if tuple(answer[at - n : at]) == gram
    ]
    if not places:
        return None
    for i in range(ahead):
        counts = Counter(answers[number][at + i] for number, at in places)
        latest = {answers[number][at + i]: place for place, (number, at) in enumerate(places)}
        token = max(counts, key=lambda token: (counts[token], latest[token]))
        places = [(number, at) for number, at in places if answers[number][at + i] == token]
    number, at = places[-1]
    return list(answers[number][at : at + ahead])


@settings(deadline=None, max_examples=50)
@given(st.lists(repeating(), max_size=4), repeating(AHEAD + SHORTEST), st.integers(1, AHEAD))
def test_a_table_knows_the_most_frequent_continuation_of_every_ngram(others, first, ahead):
    answers = [first, *others]
    table = AnswersTable.build(ids_of(answers), ahead)
    for n in LENGTHS:
        for answer in answers:
            for at in range(n, len(answer) + 1):
                gram = tuple(answer[at - n : at])
                match, place = (int(v) for v in table.lookup(torch.tensor([gram[::-1]])))
                known = {m: plain_continuation(answers, gram[n - m :], ahead) for m in LENGTHS if m <= n}
                longest = max([m for m, found in known.items() if found is not None], default=0)
                assert match == longest
                if longest:
                    assert table.tokens_T[place : place + ahead].tolist() == known[longest]
    assert table.room >= ahead


@settings(deadline=None)
@given(tables(), st.lists(repeating(1, 12), min_size=1, max_size=5))
def test_a_lookup_finds_only_what_is_there(table, some):
    everything, backwards = table.tokens_T.tolist(), [[*ids[::-1], -1, -1, -1, -1][:LONGEST] for ids in some]
    for _ in range(2):
        found = (each.tolist() for each in table.lookup(torch.tensor(backwards)))
        for row, match, place in zip(backwards, *found, strict=True):
            assert match == 0 or everything[place - match : place] == row[:match][::-1]
        # whatever the search finds is compared with the tokens
        table.hashes = {n: torch.zeros_like(hash_P) for n, hash_P in table.hashes.items()}


def test_a_table_of_answers_that_are_too_short_is_refused():
    with pytest.raises(ValueError, match="no answer has the 6 tokens that a table .*: 2 to look up and 4 to draft"):
        AnswersTable.build(ids_of([[1, 2, 3, 4, 5], []]), 4)
    table = AnswersTable.build(ids_of([[1, 2, 3, 4, 5, 6]]), 4)
    assert (table.num_entries, table.room, table.nbytes) == (1, 4, 6 * 4 + 12)
    with pytest.raises(ValueError, match="ends 4 tokens behind a match, drafting takes 5"):
        Beside(Tree.chain(5), Tree([]), 2, table=table)


@pytest.mark.parametrize(
    ("trees", "lengths", "message"),
    [
        ((Tree.chain(3), Tree.chain(3)), (2, 4), "a smaller part of the whole tree"),
        ((Tree.chain(3), Tree([[1]])), (2, 4), "a smaller part of the whole tree"),
        ((Tree.chain(3), Tree.chain(1)), (1, 4), "matches of 1 to 4 tokens, expected 2 to 4"),
        ((Tree.chain(3), Tree.chain(1)), (2, 5), "matches of 2 to 5 tokens"),
        ((Tree.chain(3), Tree.chain(1)), (4, 3), "matches of 4 to 3 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused(trees, lengths, message):
    with pytest.raises(ValueError, match=message):
        Beside(*trees, *lengths)


@settings(deadline=None)
@given(besides(), st.lists(repeating(), min_size=1, max_size=4), st.data())
def test_requests_are_looked_up_together_as_each_is_alone(beside, some, data):
    lengths_N = torch.tensor([len(ids) for ids in some])
    history_NL = torch.full((len(some), int(lengths_N.max()) + data.draw(st.integers(0, 3))), 1, dtype=torch.int32)
    for row_L, ids in zip(history_NL, some, strict=True):
        row_L[: len(ids)] = torch.tensor(ids)
    found_N, tokens_NW = continuations(
        history_NL, lengths_N, beside.table, beside.shortest, beside.longest, beside.reach
    )
    for ids, found, tokens in zip(some, found_N.tolist(), tokens_NW.tolist(), strict=True):
        assert (tokens if found else None) == beside.continuation(ids)
        assert 0 <= min(tokens) and max(tokens) < VOCAB  # what is drafted in vain, too, is a token


def plain_matches(ids: Sequence[int], longest: int) -> tuple[int, int]:
    """(match, position behind it): every earlier position is compared, token by token."""
    T = len(ids)
    matches = [(min(in_common(ids[j::-1], ids[::-1]), longest), j + 1) for j in range(T - 1)]
    return max(matches, default=(0, 0))


@settings(deadline=None, max_examples=30)
@given(st.lists(texts(), min_size=1, max_size=3), st.integers(1, LONGEST))
def test_both_searches_of_the_own_text_are_the_plain_one(some, longest):
    for text, (_, match_S) in zip(some, looked_up(some, None, 3, longest), strict=True):
        ids = text.ids_T.tolist()
        lengths_N = torch.arange(text.start + 1, len(ids))
        expected = [plain_matches(ids[:length], longest) for length in lengths_N.tolist()]
        match_N, next_N = own_matches(text.ids_T.expand(len(lengths_N), -1), lengths_N, longest)
        assert match_N.tolist() == [match for match, _ in expected]
        assert match_S.tolist() == [match if match >= SHORTEST else 0 for match, _ in expected]
        assert [at for match, at in zip(match_N, next_N, strict=True) if match] == [at for m, at in expected if m]


def plain_paths(beside: Beside, tokens: Sequence[int], ids: Sequence[int]) -> set[tuple[int, ...]]:
    """What a pass verifies, as token paths below the root: the continuation's joins those of the smaller tree, its
    shorter paths at no cost, until `chain` are new."""

    def of_tree(tree: Tree) -> set[tuple[int, ...]]:
        token = dict(zip(beside.tree.paths, tokens[1:], strict=True))
        return {tuple(token[path[:d]] for d in range(1, len(path) + 1)) for path in tree.paths}

    continuation = beside.continuation(ids)
    if continuation is None:
        return of_tree(beside.tree)
    paths, new = of_tree(beside.smaller), 0
    for length in range(1, len(continuation) + 1):
        if (path := tuple(continuation[:length])) not in paths and new < beside.chain:
            paths, new = paths | {path}, new + 1
    assert new == beside.chain
    return paths


@settings(deadline=None, max_examples=60)
@given(besides(), repeating(2), st.randoms(use_true_random=False), st.data())
def test_a_pass_verifies_and_accepts_what_the_plain_merge_does(beside, ids, random, data):
    """Replay by ranks, the merged nodes of the reference and sets of token paths."""
    text = text_of(ids, data.draw(st.integers(0, len(ids) - 2)))
    K, width = beside.tree.depth, beside.tree.width
    ranks_SK = torch.full((text.num_states, K), MISS)
    drafted = []
    for s in range(text.num_states):
        ranked = [random.sample(range(VOCAB), VOCAB) for _ in range(K)]
        root = text.start + s
        for k, true in enumerate(ids[root + 1 : root + 1 + K]):
            if random.random() < 0.6:  # else it is seldom among the first
                rank = random.randrange(width)
                other = ranked[k].index(true)
                ranked[k][rank], ranked[k][other] = ranked[k][other], ranked[k][rank]
            ranks_SK[s, k] = ranked[k].index(true)
        drafted.append(tokens_of(beside.tree, ids[root], ranked))
    (accepted_S,) = beside.accepted([text], [ranks_SK])
    for s, tokens in enumerate(drafted):
        root = text.start + s
        known, following = ids[: root + 1], tuple(ids[root + 1 :])
        paths = plain_paths(beside, tokens, known)
        topology, merged = beside.merged(tokens, known)
        assert topology.num_nodes == len(merged) == beside.tree.num_nodes == len(paths) + 1
        assert topology.depth <= beside.depth
        by_node = [tuple(merged[i] for i in row_n.nonzero().flatten().tolist()[1:]) for row_n in topology.mask_nn]
        assert {*by_node[1:]} == paths
        assert int(accepted_S[s]) == max([0, *(len(path) for path in paths if following[: len(path)] == path)])


@settings(deadline=None, max_examples=20)
@given(besides())
def test_the_last_tokens_of_a_loop_go_on_periodically(beside):
    assert beside.longest >= SHORTEST
    own = Beside(beside.tree, beside.smaller, beside.shortest, beside.longest)
    ids = [7, 8, 9] * 3
    assert own.continuation(ids) == ([7, 8, 9] * 4)[: own.reach]
    assert own.continuation([3] * 6) == [3] * own.reach
    assert own.continuation([1, 2, 3, 4]) is None
