"""What is counted in a cache, against the same counted token by token."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.conversations import ends_in_loop
from medusa_k25.data.contents import (
    MOST_VALUES,
    Census,
    Contents,
    Duplicates,
    Histogram,
    Lengths,
    answer_spans,
    end_in_loop,
    first_answer,
    tails,
)
from medusa_k25.data.splits import SPLITS, split_of
from tests.test_cache import STUB, make_document
from tests.tiny import cache_of


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_answers_are_the_runs_of_the_mask_in_each_document(masks: list[list[bool]]) -> None:
    expected, start = [], 0
    for mask in masks:
        for t, kept in enumerate(mask):
            if kept and (t == 0 or not mask[t - 1]):
                expected.append([start + t, start + t])
            if kept:
                expected[-1][1] += 1
        start += len(mask)
    starts = torch.tensor([0, *map(len, masks[:-1])]).cumsum(0)
    spans = answer_spans(torch.tensor([kept for mask in masks for kept in mask]), starts)
    assert torch.stack(spans, dim=1).tolist() == expected


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=10),
    st.lists(st.integers(0, 3), min_size=1, max_size=34),
    st.integers(0, 60),
    st.integers(0, 9),
)
@example([], list(range(32)), 24, 0)  # the longest pattern, just repeated enough
@example([], list(range(32)), 23, 0)
@example([], [7], 23, 0)  # the shortest
@example([], [7], 22, 0)
def test_loops_are_found_as_in_one_answer(prefix: list[int], pattern: list[int], repeated: int, before: int) -> None:
    ids = prefix + (pattern * (repeated + 1))[: len(pattern) + repeated]
    shard = torch.tensor([pattern[-1]] * before + ids + pattern, dtype=torch.int32)  # neighbours must not be looked at
    starts, stops = torch.tensor([before]), torch.tensor([before + len(ids)])
    assert end_in_loop(tails(shard, starts, stops)).tolist() == [ends_in_loop(ids)]


@pytest.fixture(scope="module")
def cache(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("contents") / "cache"
    return cache_of(tiny_llama, folder, num_documents=15, shard_tokens=200, turns=2, labels=("code", None, "chat"))


def test_the_second_copy_of_a_document_is_not_counted(tmp_path: Path) -> None:
    writers = [CacheWriter.open(tmp_path, STUB, "float32", "test", name) for name in ("one", "two")]
    for writer in writers:  # neither sees what the other stores
        for i, id in enumerate((f"{writer.writer}-first", "both", f"{writer.writer}-last")):
            writer.add(**make_document(id, T=6 + i, seed=i))
        writer.close()
    cache = Cache.open(tmp_path)
    total = Census(cache).total()
    assert cache.repeated == ["both"] and cache.num_shards == 2
    assert (total.documents, total.answers) == (5, 5)
    assert total.answer_tokens == sum(int(cache.loss_mask(document).sum()) for document in cache.documents)


def test_every_split_and_label_is_counted(cache: Cache) -> None:
    def counted(documents: list) -> Contents:
        masks = [cache.loss_mask(document).tolist() for document in documents]
        answers = sum(mask[t] and not mask[t - 1] for mask in masks for t in range(1, len(mask)))
        states = sum(len(cache.states(document)[0]) for document in documents)
        return Contents(
            documents=len(documents),
            tokens=sum(map(len, masks)),
            answers=answers,
            answer_tokens=sum(map(sum, masks)),
            states=states,
            bytes=4 * states * cache.hidden_size,
            cut=len(documents),
        )

    census = Census(cache)
    assert cache.num_shards > 3
    assert census.total() == counted(cache.documents) and census.total().answers == 2 * len(cache.documents)
    splits = census.by_split()
    assert list(splits) == list(SPLITS)
    for split, part in splits.items():
        assert part == counted([d for d in cache.documents if split_of(d.group, d.hash) == split])
    assert {label: part.documents for label, part in census.by_label().items()} == {
        "(no label)": 5,
        "chat": 5,
        "code": 5,
    }
    assert census.by_label()["chat"] == counted([d for d in cache.documents if d.label == "chat"])


def write(path: Path, documents: list[dict], storage_dtype: str = "float32", shard_tokens: int = 64) -> Cache:
    with CacheWriter.open(path, STUB, storage_dtype, "test", shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(**document)
    return Cache.open(path)


def test_loops_cut_and_empty_answers_are_counted_apart(tmp_path: Path) -> None:
    loop = make_document("loop", T=60, prompt_length=3) | {"finish_reason": "length"}
    loop["token_ids_T"][10:] = 7
    two = make_document("two", T=90, prompt_length=3) | {"finish_reason": "length"}  # ends in no loop, but begins so
    two["token_ids_T"][10:60] = 7
    two["token_ids_T"][60:] = torch.arange(30)
    two["loss_mask_T"][50:60] = False
    empty = make_document("empty", T=4, prompt_length=3)
    cache = write(tmp_path, [loop, empty, two, make_document("calm", T=70)], "float8_e4m3fn")
    total = Census(cache).total()
    assert (total.documents, total.answers, total.short, total.cut, total.loops) == (4, 5, 1, 2, 2)
    assert total.bytes == total.states * (cache.hidden_size + 4)  # with the scale


def test_equal_prompts_are_counted_and_those_in_two_splits(tmp_path: Path) -> None:
    groups = {split: next(str(i) for i in range(99) if split_of(str(i), "") == split) for split in SPLITS}

    def document(id: str, prompt: list[int], group: str | None) -> dict:
        made = make_document(id, T=8, prompt_length=2) | {"group": group}
        made["token_ids_T"][:2] = torch.tensor(prompt)
        return made

    cache = write(
        tmp_path,
        [
            document("a", [1, 2], groups["train"]),
            document("b", [1, 2], groups["heldout"]),
            document("c", [1, 2], groups["train"]),
            document("d", [2, 1], groups["train"]),
            document("e", [2, 1], groups["train"]),
            document("f", [3, 3], None),
        ],
    )
    assert Census(cache).duplicates() == Duplicates(prompts=3, documents=5, left_out=2)


def test_origins_are_counted_by_aspect(tmp_path: Path) -> None:
    origin = {"engine": "sglang 0.5.23", "quantisation": "int4", "thinking": True, "tools": False, "ids": "generated"}
    documents = [make_document(f"d{i}", seed=i) | {"origin": origin} for i in range(3)]
    documents.append(make_document("instant") | {"origin": origin | {"thinking": False, "ids": "rendered"}})
    unknown = {"mode": "unknown", "temperature": None, "top_p": None}
    old = {"origin": {}, "sampling": unknown, "finish_reason": "length", "dtype": "bfloat16"}
    documents.append(make_document("old") | old)
    origins = Census(write(tmp_path, documents)).origins()
    assert origins["engine"] == {"sglang 0.5.23": 4, "unknown": 1}
    assert origins["mode"] == {"thinking": 3, "instant": 1, "unknown, or has none": 1}
    assert origins["tools"] == {"without tools": 4, "unknown": 1}
    assert origins["token ids"] == {"generated": 3, "rendered": 1, "unknown": 1}
    assert origins["quantisation"] == {"int4": 4, "unknown": 1}
    assert origins["dtype"] == {"float32": 4, "bfloat16": 1}
    assert origins["finish reason"] == {"stop": 4, "length": 1}
    assert origins["sampling"] == {"greedy": 4, "unknown": 1}


def test_the_rarest_values_are_added_up(tmp_path: Path) -> None:
    documents = [make_document(f"d{i}") | {"sampling": {"temperature": min(i, 30), "top_p": 0.9}} for i in range(40)]
    sampling = Census(write(tmp_path, documents)).origins()["sampling"]
    assert len(sampling) == MOST_VALUES + 1 and sum(sampling.values()) == 40
    assert sampling["temperature 30, top-p 0.9"] == 10 and list(sampling)[-1] == "(others)"


def test_an_empty_cache_holds_nothing(tmp_path: Path) -> None:
    census = Census(write(tmp_path, []))
    assert census.total() == Contents() and census.by_label() == {} and census.origins() == {}
    assert census.duplicates() == Duplicates(0, 0, 0)


def test_lengths_and_histograms() -> None:
    lengths = torch.tensor([5] * 90 + [100] * 9 + [1000])
    assert Lengths.of(lengths) == Lengths(median=5, p95=100, max=1000)
    histogram = Histogram.of(lengths)
    assert histogram.width == 42 and sum(histogram.counts) == 100 and len(histogram.counts) == 24
    assert (histogram.counts[0], histogram.counts[2], histogram.counts[23]) == (90, 9, 1)
    assert Histogram.of(lengths[:3]) == Histogram(1, [0, 0, 0, 0, 0, 3])
    assert (Lengths.of(lengths[:0]), Histogram.of(lengths[:0])) == (Lengths(0, 0, 0), Histogram(1, []))


def test_a_sample_surrounds_the_start_of_the_first_answer(tmp_path: Path) -> None:
    document = make_document("a", T=20, prompt_length=10)
    document["token_ids_T"] = torch.arange(20)
    document["loss_mask_T"][13:15] = False
    cache = write(tmp_path, [document])
    ids, mask = first_answer(cache, cache.documents[0], before=2, after=6)
    assert ids == [8, 9, 10, 11, 12, 13, 14, 15]
    assert mask == [False, False, True, True, True, False, False, True]
    assert first_answer(cache, cache.documents[0])[0] == list(range(20))
