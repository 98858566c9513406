"""What training reads, held against the texts themselves: any masks, storage and order of capture."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.sampler import Share
from medusa_k25.data.splits import SPLITS, split_of
from medusa_k25.data.windows import Windows, all_runs, documents_of, runs_of, token_counts
from tests.test_cache import STUB, D, V, make_document, write

TURNS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=4)  # tokens read, answered


def make_turns(id: str, turns: list[tuple[int, int]], unread: int, everywhere: bool, final: bool) -> dict[str, Any]:
    """Turns of prompts and answers, `unread` tokens behind them; states everywhere or only where answers need them."""
    mask = [marked for read, answered in turns for marked in [False] * read + [True] * answered] + [False] * unread
    T = len(mask)
    last_answer_token = T - unread - 1
    needed = [t for t in range(T) if everywhere or t >= last_answer_token or mask[t + 1]]
    positions_M = torch.tensor([t for t in needed if final or t < T - 1], dtype=torch.long)
    generator = torch.Generator().manual_seed(len(id) * 1000 + T)
    return make_document(id) | {
        "token_ids_T": torch.randint(V, (T,), generator=generator),
        "loss_mask_T": torch.tensor(mask),
        "hidden_MD": torch.randn(len(positions_M), D, generator=generator),
        "positions_M": positions_M,
        "prompt_length": turns[0][0],
    }


def by_hand(cache: Cache, num_heads: int) -> list[tuple[Tensor, list[int]]]:
    """(state, root and labels) of every position that has a label for head 1, from the documents alone."""
    rows = []
    for document in cache.documents:
        ids, mask = cache.token_ids(document).tolist(), cache.loss_mask(document).tolist()
        for state_D, t in zip(*(part for part in cache.states(document)), strict=True):
            future = []
            for token in range(int(t) + 1, int(t) + 2 + num_heads):
                if token >= len(ids) or not mask[token]:
                    break
                future.append(ids[token])
            if len(future) > 1:
                rows.append((state_D, future + [IGNORE] * (num_heads + 1 - len(future))))
    return rows


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(TURNS, st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_windows_are_the_labelled_positions_of_the_texts(
    drawn: list[tuple[list[tuple[int, int]], int, bool, bool]],
    storage_dtype: str,
    shard_tokens: int,
    window: int,
    num_heads: int,
) -> None:
    documents = [make_turns("x" * i, *options) for i, options in enumerate(drawn)]
    documents = [document for document in documents if document["loss_mask_T"][1:].any()]
    with TemporaryDirectory() as folder:
        write(Path(folder), documents, storage_dtype, shard_tokens=shard_tokens)
        cache = Cache.open(folder, check=False)
        wanted = by_hand(cache, num_heads)
        assert all_runs(cache, cache.documents) == [run for one in cache.documents for run in runs_of(cache, one)]
        windows = Windows(cache, cache.documents, window, num_heads)
        assert windows.num_positions == len(wanted)
        draftable_V = torch.arange(V) % 3 > 0
        counts_WK = windows.label_counts(draftable_V)
        assert counts_WK.shape == (-(-len(wanted) // window), num_heads)
        for i in range(len(windows)):
            batch = windows[Share([i], torch.zeros(num_heads))]
            rows = wanted[i * window : (i + 1) * window]
            assert torch.equal(batch.hidden_ND, torch.stack([state_D for state_D, _ in rows]))
            assert batch.future_NK.tolist() == [future for _, future in rows]
            labels_NK = batch.future_NK[:, 1:]
            assert torch.equal(counts_WK[i], ((labels_NK != IGNORE) & draftable_V[labels_NK.clamp(min=0)]).sum(dim=0))
        some = cache.documents[::2]
        ids = torch.cat([cache.token_ids(one)[cache.loss_mask(one)] for one in some] + [torch.empty(0)]).long()
        assert torch.equal(token_counts(cache, some), ids.bincount(minlength=V))
        assert all_runs(cache, some) == [run for one in some for run in runs_of(cache, one)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([None, *"abcdefgh"])), min_size=2, max_size=24),
    st.integers(1, 3),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_more_data_never_moves_a_document_and_no_prompt_is_in_two_splits(
    drawn: list[tuple[int, str | None]], num_writers: int, shard_tokens: int, random: Any
) -> None:
    """Few prompts and few groups, so that many documents share one."""
    documents = [
        make_document(str(i), seed=i) | {"group": group, "token_ids_T": torch.tensor([prompt, 1, i, i, i, i])}
        for i, (prompt, group) in enumerate(drawn)
    ]
    random.shuffle(documents)
    own: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        for i, document in enumerate(documents):
            with CacheWriter.open(folder, STUB, "float32", "t", f"w{i % num_writers}", shard_tokens) as writer:
                writer.add(**document)
            cache = Cache.open(folder)
            splits = {split: documents_of(cache, split) for split in SPLITS}
            prompts = {split: {one.hash for one in some} for split, some in splits.items()}
            assert sum(map(len, prompts.values())) == len(set.union(*prompts.values()))
            for split, some in splits.items():
                for one in some:
                    assert own.setdefault(one.id, split) == split == split_of(one.group, one.hash)
            there = {one.id for some in splits.values() for one in some}
            for one in cache.documents:  # left out only for a copy of its prompt that is reported on
                if one.id not in there:
                    before = SPLITS.index(split_of(one.group, one.hash))
                    assert any(one.hash in prompts[split] for split in SPLITS[before + 1 :])
