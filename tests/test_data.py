import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.data.datamodule import EqualShares, join
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.sampler import Position, ResumableBatches
from medusa_k25.data.windows import Windows, answers_of, future_of, runs_of, token_counts
from tests.tiny import cache_of


def test_windows_hold_every_labelled_position_once(tmp_path, tiny_llama):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=30, storage="all", shard_tokens=150)
    assert cache.num_shards > 2
    by_hand = []
    for document in cache.documents:
        ids, hidden = cache.token_ids(document).tolist(), cache.states(document)[0]
        for t in range(document.prompt_length - 1, document.length - 2):  # the last state with a label for head 1
            future = ids[t + 1 : t + 5]
            by_hand.append((hidden[t], future + [IGNORE] * (4 - len(future))))
    for window in (7, 64, 10_000):
        windows = Windows(cache, cache.documents, window, num_heads=3)
        samples = [windows[i] for i in range(len(windows))]
        assert all(len(hidden) == window for hidden, _ in samples[:-1])
        hidden_ND, future_NK = join(samples, empty=(torch.empty(0, 64), torch.empty(0, 4, dtype=torch.long)))
        assert future_NK.tolist() == [row for _, row in by_hand]
        assert torch.equal(hidden_ND, torch.stack([state for state, _ in by_hand]))


def test_answers_only_and_all_states_give_the_same_windows(tmp_path, tiny_llama):
    caches = [
        cache_of(tiny_llama, tmp_path / storage, num_documents=8, storage=storage) for storage in ("all", "answers")
    ]
    assert caches[0].num_states > caches[1].num_states
    (a, b), (c, d) = (Windows(cache, cache.documents, 16, 3)[2] for cache in caches)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def test_a_document_with_two_answers_has_two_runs(tmp_path, tiny_llama):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=3, turns=2)
    for document in cache.documents:
        runs = runs_of(cache, document)
        assert len(runs) == 2
        mask = cache.loss_mask(document)
        spans = [future_of(cache, run, 1)[:, 0].tolist() for run in runs]
        answer_ids = cache.token_ids(document)[mask].tolist()
        # a run holds the roots of its answer: all its tokens but the last
        assert spans[0] == answer_ids[: len(spans[0])]
        assert spans[1] == answer_ids[len(spans[0]) + 1 : -1]
        for hidden_SD, future_SK in answers_of(cache, document, 3):
            assert len(hidden_SD) == len(future_SK)
            assert (future_SK[:, 1] != IGNORE).all()


def test_token_counts_are_those_of_the_answers(tmp_path, tiny_llama):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=5)
    counts_V = token_counts(cache, cache.documents)
    ids = [i for d in cache.documents for i in cache.token_ids(d)[cache.loss_mask(d)].tolist()]
    assert counts_V.tolist() == [ids.count(v) for v in range(tiny_llama.vocab_size)]


def batches(position, rank=0, world_size=1, n=23, batch_size=3, seed=5):
    return list(ResumableBatches(n, batch_size, seed, rank, world_size, position))


@given(st.integers(4, 60), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_sample_is_seen_once_an_epoch_whatever_the_ranks(n, batch_size, world_size, epoch):
    shares = [batches(Position(epoch), rank, world_size, n, batch_size) for rank in range(world_size)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(n))
    assert len({len(share) for share in shares}) == 1
    assert all(len(batch) == batch_size for share in shares for batch in share[:-1])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_resuming_with_other_ranks_replays_and_loses_nothing(first_world, second_world, steps):
    order = [i for batch in batches(Position(2), n=40) for i in batch]
    consumed = steps * 3 * first_world
    seen = [i for r in range(first_world) for b in batches(Position(2), r, first_world, 40)[:steps] for i in b]
    rest = [
        i
        for rank in range(second_world)
        for batch in batches(Position(2, consumed), rank, second_world, 40)
        for i in batch
    ]
    assert sorted(seen + rest) == sorted(order)


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(ValueError, match="3 training samples for 4 ranks"):
        batches(Position(), world_size=4, n=3)


def test_seven_samples_on_two_ranks_end():
    assert [len(batches(Position(), rank, 2, n=7, batch_size=2)) for rank in (0, 1)] == [2, 2]


def test_epochs_differ_and_a_seed_repeats_them():
    assert batches(Position(0)) != batches(Position(1))
    assert batches(Position(1)) == batches(Position(1))
    assert batches(Position(1)) != batches(Position(1), seed=6)


@given(st.integers(1, 20), st.integers(1, 5))
def test_validation_shares_are_equally_long(n, world_size):
    shares = [list(EqualShares(n, rank, world_size)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {len(EqualShares(n, 0, world_size))}
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(n))
