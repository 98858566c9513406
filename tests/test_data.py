from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25.data.datamodule import EqualShares
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.sampler import Position, Share, StepShares
from medusa_k25.data.splits import split_of
from medusa_k25.data.windows import Windows, answers_of, future_of, in_share, runs_of, token_counts
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
        assert all(len(windows[share(i)].hidden_ND) == window for i in range(len(windows) - 1))
        batch = windows[share(*range(len(windows)))]
        assert batch.future_NK.tolist() == [row for _, row in by_hand]
        assert torch.equal(batch.hidden_ND, torch.stack([state for state, _ in by_hand]))


def share(*windows):
    return Share(list(windows), torch.zeros(3, dtype=torch.long))


def test_an_empty_share_has_no_rows(tmp_path, tiny_llama):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=2)
    batch = Windows(cache, cache.documents, 16, 3)[share()]
    assert batch.hidden_ND.shape == (0, 64)
    assert batch.future_NK.shape == (0, 4)


@pytest.mark.parametrize("storage", ["all", "answers"])
def test_row_n_plus_k_teaches_head_k_wherever_it_has_a_label(tmp_path, tiny_llama, storage):
    """The teacher of head k at t is the target's own state h_{t+k}; none lies in another answer or window's gap."""
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=6, turns=2, storage=storage)
    lm_head_VD = tiny_llama.lm_head.float()
    windows = Windows(cache, cache.documents, 10, 3, teacher_states=True)
    plain = Windows(cache, cache.documents, 10, 3)
    for i in range(len(windows)):
        hidden_ND, future_NK, _ = windows[share(i)]
        for k in range(1, 4):
            rows = (future_NK[:, k] != IGNORE).nonzero().flatten()
            # the texts are greedy: the teacher's best token is the label
            assert torch.equal((hidden_ND[rows + k] @ lm_head_VD.T).argmax(dim=1), future_NK[rows, k])
        labelled = future_NK[:, 0] != IGNORE
        assert torch.equal(hidden_ND[labelled], plain[share(i)].hidden_ND)
        assert torch.equal(future_NK[labelled], plain[share(i)].future_NK)


@pytest.fixture(scope="module")
def short_answers(tmp_path_factory, tiny_llama):
    """Answers of 1 to 24 tokens."""
    folder = tmp_path_factory.mktemp("short") / "cache"
    return cache_of(tiny_llama, folder, num_documents=25, end_ids=tuple(range(0, 512, 7)))


@settings(deadline=None)  # the first call reads the file
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 5))
def test_label_counts_are_those_of_the_labels(short_answers, window, num_heads, seed):
    cache = short_answers
    draftable_V = torch.rand(cache.vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.5
    windows = Windows(cache, cache.documents, window, num_heads)
    counts_WK = windows.label_counts(draftable_V)
    for i in range(len(windows)):
        labels_NK = windows[share(i)].future_NK[:, 1:]
        counted_NK = (labels_NK != IGNORE) & draftable_V[labels_NK.clamp(min=0)]
        assert counts_WK[i].tolist() == counted_NK.sum(dim=0).tolist()


def test_answers_only_and_all_states_give_the_same_windows(tmp_path, tiny_llama):
    caches = [
        cache_of(tiny_llama, tmp_path / storage, num_documents=8, storage=storage) for storage in ("all", "answers")
    ]
    assert caches[0].num_states > caches[1].num_states
    (a, b, _), (c, d, _) = (Windows(cache, cache.documents, 16, 3)[share(2)] for cache in caches)
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


def steps(position, rank=0, world_size=1, n=23, batch_size=3, seed=5, accumulate=1, count=30):
    """The windows of this rank's micro-batches, step after step: [count][accumulate] lists."""
    shares = StepShares(torch.ones(n, 2, dtype=torch.long), batch_size, accumulate, seed, rank, world_size, position)
    micro_batches = [share.windows for share in islice(shares, count * accumulate)]
    return [micro_batches[i : i + accumulate] for i in range(0, len(micro_batches), accumulate)]


def whole_steps(position, world_size, batch_size, accumulate=1, **options):
    """The windows of whole steps, over all ranks and micro-batches."""
    ranks = [
        steps(position, r, world_size, batch_size=batch_size, accumulate=accumulate, **options)
        for r in range(world_size)
    ]
    return [sorted(i for rank in ranks for micro_batch in rank[s] for i in micro_batch) for s in range(len(ranks[0]))]


@given(st.integers(4, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_every_window_is_seen_once_an_epoch_whatever_the_ranks(n, batch_size, world_size, accumulate, epoch):
    an_epoch = -(-n // (batch_size * world_size * accumulate))
    seen = whole_steps(Position(epoch), world_size, batch_size, accumulate, n=n, count=2 * an_epoch)
    for half in (seen[:an_epoch], seen[an_epoch:]):
        assert sorted(i for step in half for i in step) == list(range(n))
        assert all(len(step) == batch_size * world_size * accumulate for step in half[:-1])


@given(st.sampled_from([(1, 6, 1), (2, 3, 1), (1, 3, 2), (3, 1, 2), (6, 1, 1)]))
def test_a_step_takes_the_same_windows_however_it_is_dealt_out(deal):
    assert whole_steps(Position(1), *deal) == whole_steps(Position(1), 1, 6)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_resuming_with_other_ranks_replays_and_loses_nothing(first_world, second_world, accumulate, taken):
    consumed = taken * 3 * first_world
    seen = whole_steps(Position(2), first_world, 3, n=40, count=taken)
    left = -(-(40 - consumed) // (3 * second_world * accumulate))
    rest = whole_steps(Position(2, consumed), second_world, 3, accumulate, n=40, count=left)
    assert sorted(i for step in seen + rest for i in step) == list(range(40))


def test_every_share_carries_the_labels_of_its_whole_step():
    counts_WK = torch.randint(0, 9, (23, 2), generator=torch.Generator().manual_seed(0))
    ranks = [list(islice(StepShares(counts_WK, 2, 2, 0, rank, 2, Position()), 6)) for rank in range(2)]
    for step in range(3):
        micro_batches = [rank[2 * step + i] for rank in ranks for i in range(2)]
        windows = [w for share in micro_batches for w in share.windows]
        assert all(torch.equal(share.count_K, counts_WK[windows].sum(dim=0)) for share in micro_batches)


def test_seven_windows_on_two_ranks_end():
    assert whole_steps(Position(), 2, 2, n=7, count=2)[1:] == [
        sorted(set(range(7)) - set(whole_steps(Position(), 2, 2, n=7, count=1)[0]))
    ]


def test_epochs_differ_and_a_seed_repeats_them():
    assert steps(Position(0)) != steps(Position(1))
    assert steps(Position(1)) == steps(Position(1))
    assert steps(Position(1)) != steps(Position(1), seed=6)


@given(st.integers(1, 20), st.integers(1, 5))
def test_validation_shares_are_equally_long(n, world_size):
    shares = [list(EqualShares(n, rank, world_size)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {len(EqualShares(n, 0, world_size))}
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(n))


def test_shares_of_the_training_text_are_nested_and_as_large_as_they_say():
    documents: list[Any] = [SimpleNamespace(hash=f"{i}") for i in range(4000)]
    before: set[str] = set()
    for share_ in (0.1, 0.25, 0.5, 1.0):
        chosen = [document.hash for document in in_share(documents, share_)]
        assert before <= {*chosen}
        assert len(chosen) / len(documents) == pytest.approx(share_, abs=0.03)
        before = {*chosen}
    assert len(before) == len(documents)
    held_out = [document for document in documents if split_of(None, document.hash) == "heldout"]
    assert len(in_share(held_out, 0.5)) / len(held_out) == pytest.approx(0.5, abs=0.08)  # another hash than the split's
    for wrong in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=f"data.share={wrong}: expected a part"):
            in_share(documents, wrong)
    with pytest.raises(ValueError, match=r"data.share=0.0001 of 3 training documents are none; take a larger"):
        in_share(documents[:3], 0.0001)
