"""The cache: what is written is read back, whatever happens to the writer; what is wrong is refused with a reason."""

import errno
import json
import math
import multiprocessing
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from medusa_k25.cache import Cache, CacheWriter, self_check, verify
from medusa_k25.cache.alignment import Sample, Scores, unlike_its_own_text
from medusa_k25.cache.manifest import sealed_line
from medusa_k25.cache.writer import quantise
from medusa_k25.target import Target

D, V = 8, 50


@dataclass(frozen=True)
class StubTarget:
    name: str = "stub"
    revision: str = "local"
    quantisation: str = "none"
    hidden_size: int = D
    vocab_size: int = V
    fingerprints: dict[str, str] = field(default_factory=lambda: {"lm_head": "a", "final_norm": "b", "tokenizer": "c"})
    path: Path = Path("stub")

    @property
    def identity(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("name", "revision", "quantisation", "fingerprints")}


STUB: Any = StubTarget()


def make_document(
    id: str, T: int = 6, prompt_length: int = 2, everywhere: bool = True, seed: int = 0
) -> dict[str, Any]:
    """Arguments of `CacheWriter.add`: one answer after a prompt; states everywhere or only where they must be."""
    generator = torch.Generator().manual_seed(seed)
    positions_M = torch.arange(0 if everywhere else max(prompt_length - 1, 0), T if everywhere else T - 1)
    return {
        "id": id,
        "group": None,
        "token_ids_T": torch.randint(V, (T,), generator=generator),
        "loss_mask_T": torch.arange(T) >= prompt_length,
        "hidden_MD": torch.randn(len(positions_M), D, generator=generator),
        "positions_M": positions_M,
        "prompt_length": prompt_length,
        "finish_reason": "stop",
        "sampling": {"mode": "greedy", "temperature": 0.0, "top_p": 1.0},
        "dtype": "float32",
        "label": None,
        "origin": {"engine": "test 1.0", "thinking": None},
    }


def write(path: Path, documents: list[dict[str, Any]], storage_dtype: str = "float32", **options: Any) -> None:
    with CacheWriter.open(path, STUB, storage_dtype, "test", **options) as writer:
        for document in documents:
            writer.add(**document)


def assert_stored(cache: Cache, documents: list[dict[str, Any]]) -> None:
    """The cache holds exactly these documents, in any order, bit for bit."""
    stored = {document.id: document for document in cache.documents}
    assert sorted(stored) == sorted(document["id"] for document in documents)
    assert len(stored) == len(cache.documents)
    for wanted in documents:
        document = stored[wanted["id"]]
        hidden_MD, positions_M = cache.states(document)
        assert torch.equal(cache.token_ids(document), wanted["token_ids_T"].int())
        assert torch.equal(cache.loss_mask(document), wanted["loss_mask_T"])
        assert torch.equal(positions_M, wanted["positions_M"])
        for name in ("group", "prompt_length", "finish_reason", "sampling", "dtype", "label", "origin"):
            assert getattr(document, name) == wanted[name]
        stored_dtype = cache.manifest.storage_dtype
        if stored_dtype == "float8_e4m3fn":
            fp8_MD, scales_M = quantise(wanted["hidden_MD"])
            torch.testing.assert_close(hidden_MD, fp8_MD.float() * scales_M[:, None], rtol=0, atol=0)
        else:
            assert torch.equal(hidden_MD, wanted["hidden_MD"].to(getattr(torch, stored_dtype)))


documents_strategy = st.lists(
    st.tuples(st.integers(2, 12), st.integers(0, 11), st.booleans(), st.integers(0, 2), st.integers(0, 2**31)),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(documents_strategy, st.integers(1, 40), st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
def test_what_was_written_is_read_back(
    drawn: list[tuple[int, int, bool, int, int]], shard_tokens: int, storage_dtype: str
) -> None:
    with TemporaryDirectory() as folder:
        documents = [
            make_document(f"d{i}", T, min(prompt, T - 1), everywhere, seed)
            for i, (T, prompt, everywhere, _, seed) in enumerate(drawn)
        ]
        # several writers at once, and again later under the same names
        for half in (slice(None, None, 2), slice(1, None, 2)):
            writers = [CacheWriter.open(folder, STUB, storage_dtype, "t", f"w{w}", shard_tokens) for w in range(3)]
            for (*_, writer, _), document in list(zip(drawn, documents, strict=True))[half]:
                writers[writer].add(**document)
            for opened in writers:
                opened.close()
        cache = Cache.open(folder)
        assert_stored(cache, documents)
        assert cache.num_tokens == sum(len(document["token_ids_T"]) for document in documents)
        assert cache.num_states == sum(len(document["positions_M"]) for document in documents)
        assert all(faults == [] for faults in verify(cache))
        for stored in cache.documents:  # the shard's own view agrees with the document's
            rows = slice(stored.row_start, stored.row_stop)
            assert torch.equal(cache.shard_positions(stored.shard)[rows] - stored.start, cache.positions(stored))
            assert stored.start + stored.length <= len(cache.shard_token_ids(stored.shard))


def test_120_documents_keep_their_order_through_shard_10_and_100(tmp_path: Path) -> None:
    documents = [make_document(f"d{i}", seed=i) for i in range(120)]
    write(tmp_path, documents, shard_tokens=1)
    cache = Cache.open(tmp_path)
    assert [document.id for document in cache.documents] == [document["id"] for document in documents]
    assert [document.shard for document in cache.documents] == list(range(120))
    assert_stored(cache, documents)


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    document = make_document("a", everywhere=False)
    write(tmp_path, [document, make_document("b", T=5)])
    [file] = (tmp_path / "shards").iterdir()
    with safe_open(file, framework="pt") as shard:
        assert set(shard.keys()) == {"token_ids", "loss_mask", "document_starts", "hidden", "hidden_positions"}
        assert shard.get_tensor("document_starts").tolist() == [0, 6]
        assert shard.get_tensor("hidden_positions").tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10]
        assert torch.equal(shard.get_tensor("hidden")[:4], document["hidden_MD"])
        assert shard.get_tensor("token_ids").dtype == torch.int32 and shard.get_tensor("loss_mask").dtype == torch.bool


def test_the_hash_is_that_of_the_prompt(tmp_path: Path) -> None:
    ids_T = torch.arange(6)
    other_T = torch.tensor([0, 1, 9, 9, 9, 9])
    documents = [
        make_document(id) | {"token_ids_T": ids} for id, ids in (("a", ids_T), ("b", other_T), ("c", ids_T + 1))
    ]
    write(tmp_path, documents)
    a, b, c = (document.hash for document in Cache.open(tmp_path).documents)
    assert a == b != c


# Floating-point storage


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(-37, 37))
def test_fp8_error_is_bounded(seed: int, exponent: float) -> None:
    hidden_MD = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    fp8_MD, scales_M = quantise(hidden_MD)
    error_MD = (fp8_MD.float() * scales_M[:, None] - hidden_MD).abs()
    # 3 bits after the point: half a step is 1/16 of the value; below 2^-6 steps are 2^-9 of the scale
    bound_MD = torch.maximum(hidden_MD.abs() / 16, scales_M[:, None] * 2**-10) * 1.001
    assert (error_MD <= bound_MD).all()
    if exponent > -30:
        torch.testing.assert_close(scales_M, hidden_MD.abs().amax(dim=1) / 448)


def test_fp8_keeps_zero_and_denormal_rows_finite() -> None:
    hidden_MD = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [3e-42, 1e-44], [3e38, -3e38], [1e-30, 1e30]])
    fp8_MD, scales_M = quantise(hidden_MD)
    restored_MD = fp8_MD.float() * scales_M[:, None]
    assert restored_MD.isfinite().all() and (restored_MD[0] == 0).all()


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_read_rows_into_a_buffer_equals_a_new_tensor(tmp_path: Path, storage_dtype: str) -> None:
    write(tmp_path, [make_document("a", T=9), make_document("b", T=7, seed=1)], storage_dtype)
    cache = Cache.open(tmp_path)
    rows_MD = cache.read_rows(0, 3, 13)
    assert rows_MD.dtype == (torch.bfloat16 if storage_dtype == "bfloat16" else torch.float32)
    assert torch.equal(rows_MD, torch.cat([cache.states(document)[0] for document in cache.documents])[3:13])
    for out in (
        torch.empty(10, D),
        torch.empty(10, D, dtype=torch.bfloat16),
        torch.empty(D, 10).T,  # not contiguous
        torch.empty(20, D)[5:15],
    ):
        assert cache.read_rows(0, 3, 13, out) is out
        assert torch.equal(out, rows_MD.to(out.dtype))
    assert cache.read_rows(0, 5, 5).shape == (0, D)
    for start, stop in ((-1, 2), (3, 2), (0, 17)):
        with pytest.raises(ValueError, match="16 rows"):
            cache.read_rows(0, start, stop)
    with pytest.raises(ValueError, match=r"out has shape \[3, 8\], expected \[2, 8\]"):
        cache.read_rows(0, 0, 2, torch.empty(3, D))


def test_the_writer_keeps_nothing_of_the_callers_tensors(tmp_path: Path) -> None:
    document = make_document("a")
    wanted = {name: v.clone() if isinstance(v, Tensor) else v for name, v in document.items()}
    with CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:
        writer.add(**document)
        for value in document.values():
            if isinstance(value, Tensor):
                value.zero_()
    assert_stored(Cache.open(tmp_path), [wanted])


# Documents that are refused


def without_state(position: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        keep_M = document["positions_M"] != position
        document |= {"positions_M": document["positions_M"][keep_M], "hidden_MD": document["hidden_MD"][keep_M]}

    return change


def with_value(name: str, index: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[name][index] = value

    return change


def with_entry(name: str, change_value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[name] = change_value(document[name])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_value("hidden_MD", (3, 1), torch.nan), "1 states hold NaN or Inf, the first at position 3"),
        (with_value("hidden_MD", (5, 0), -torch.inf), "NaN or Inf, the first at position 5"),
        (with_value("token_ids_T", 4, V), "token id 50 at position 4, expected 0 to 49"),
        (with_value("token_ids_T", 0, -1), "token id -1 at position 0"),
        (with_value("token_ids_T", 0, 2**32), "token id 4294967296 at position 0"),
        (with_value("loss_mask_T", slice(None), False), "marks no token to predict"),
        (with_value("loss_mask_T", slice(1, None), False), "marks no token to predict"),
        (without_state(1), "1 positions lack a state, the first is 1 of 6"),
        (without_state(4), "1 positions lack a state, the first is 4 of 6"),
        (with_entry("hidden_MD", lambda h: h[1:]), r"hidden has shape \[5, 8\], expected \[6, 8\].*prefix caching"),
        (with_entry("hidden_MD", lambda h: h[:, 1:]), r"hidden has shape \[6, 7\]"),
        (with_entry("positions_M", lambda p: p.flip(0)), "not strictly increasing"),
        (with_value("positions_M", 1, 0), "not strictly increasing"),
        (with_entry("positions_M", lambda p: p + 1), "positions run from 1 to 6, expected 0 to 5"),
        (with_entry("loss_mask_T", lambda m: m[1:]), "loss mask has shape"),
        (with_entry("prompt_length", lambda p: 7), "prompt_length is 7, expected 0 to 6"),
    ],
)
def test_a_wrong_document_is_refused_and_the_others_stay(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    good, bad = make_document("good"), make_document("bad-one", everywhere=True, seed=1)
    change(bad)
    writer = CacheWriter.open(tmp_path, STUB, "float32", "test")
    with pytest.raises(ValueError, match=f"document 'bad-one': .*{message}"), writer:
        writer.add(**good)
        writer.add(**bad)
    assert_stored(Cache.open(tmp_path), [good])


def test_states_may_be_missing_before_each_answers_last_prompt_token(tmp_path: Path) -> None:
    # two answers, [2, 4) and [7, 9): predicted by the states at 1, 2 and 6, 7; the last answer's end needs no state
    document = make_document("a", T=9)
    document["loss_mask_T"] = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1]).bool()
    for position in (0, 3, 4, 5, 8):
        without_state(position)(document)
    write(tmp_path / "good", [document])
    assert_stored(Cache.open(tmp_path / "good"), [document])
    for position in (1, 2, 6, 7):
        lacking = dict(document)
        without_state(position)(lacking)
        with pytest.raises(ValueError, match=f"1 positions lack a state, the first is {position} of 9"):
            write(tmp_path / "bad", [lacking])
    after = make_document("b", T=9)  # text after the last answer has no answer to come
    after["loss_mask_T"] = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0]).bool()
    without_state(5)(after)
    with pytest.raises(ValueError, match="the first is 5 of 9"):
        write(tmp_path / "bad", [after])


def test_a_fact_that_json_cannot_hold_fails_before_it_is_accepted(tmp_path: Path) -> None:
    good = make_document("good")
    with pytest.raises(TypeError), CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:
        writer.add(**good)
        writer.add(**make_document("bad") | {"sampling": {"temperature": torch.tensor(1.0)}})
    assert_stored(Cache.open(tmp_path), [good])


def test_a_document_is_stored_once(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a")])
    with CacheWriter.open(tmp_path, STUB, "float32", "test", "second") as writer:
        assert writer.ids == {"a"}
        writer.add(**make_document("b"))
        for id in ("a", "b"):
            with pytest.raises(ValueError, match=f"document '{id}' is already in"):
                writer.add(**make_document(id))


# Writers that stop


def test_an_index_cut_at_any_byte_loses_no_finished_shard(tmp_path: Path) -> None:
    documents = [make_document(f"d{i}", T=3 + i, seed=i) for i in range(3)]
    write(tmp_path / "whole", documents, shard_tokens=1)
    content = (tmp_path / "whole/index/main.jsonl").read_bytes()
    for length in list(range(0, len(content), 37)) + [content.index(b"\n"), content.index(b"\n") + 1, len(content) - 1]:
        path = tmp_path / f"cut{length}"
        shutil.copytree(tmp_path / "whole", path)
        (path / "index/main.jsonl").write_bytes(content[:length])
        (path / "shards/main-00001.safetensors.tmp").write_bytes(b"left by a killed writer")
        finished = content[:length].count(b"\n")
        assert_stored(Cache.open(path), documents[:finished])
        with CacheWriter.open(path, STUB, "float32", "test", shard_tokens=1) as writer:
            for document in documents:
                if document["id"] not in writer.ids:
                    writer.add(**document)
        cache = Cache.open(path)
        assert_stored(cache, documents)
        assert [cache.shard_path(shard).name for shard in range(3)] == [f"main-{i:05}.safetensors" for i in range(3)]
        assert all(faults == [] for faults in verify(cache))


def test_a_cache_is_readable_while_it_grows(tmp_path: Path) -> None:
    with CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:
        assert Cache.open(tmp_path).documents == []
        writer.add(**make_document("a"))
        writer.flush()
        first = Cache.open(tmp_path)
        writer.add(**make_document("b", seed=1))
        writer.flush()
        second = Cache.open(tmp_path)
    assert_stored(first, [make_document("a")])
    assert_stored(second, [make_document("a"), make_document("b", seed=1)])
    assert first.fingerprint != second.fingerprint == Cache.open(tmp_path).fingerprint


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.test_cache import *
with CacheWriter.open(sys.argv[1], STUB, "float32", "test", shard_tokens=1) as writer:
    for i in range(100_000):
        writer.add(**make_document(f"d{i}", T=200, seed=i))
        writer.flush()
        print(i, flush=True)
"""


def test_a_writer_killed_at_work(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, root], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for _ in range(3):
            assert process.stdout.readline()
        assert len(Cache.open(tmp_path).documents) >= 3  # while the other process writes
        with pytest.raises(
            ValueError, match="another process is writing to .* as writer 'main'; give this one another"
        ):
            CacheWriter.open(tmp_path, STUB, "float32", "test")
        write(tmp_path, [make_document("mine")], writer="other")
        for _ in range(3):
            assert process.stdout.readline()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = 6 + len(process.stdout.read().splitlines())
    process.stdout.close()
    cache = Cache.open(tmp_path)
    stored = [document.id for document in cache.documents if document.id != "mine"]
    assert len(stored) in (done, done + 1)  # the last one may have been killed before it was printed
    with CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:  # the lock went with the process
        assert writer.ids == {*stored, "mine"}
        writer.add(**make_document("last"))
    wanted = [make_document(f"d{i}", T=200, seed=i) for i in range(len(stored))]
    assert_stored(Cache.open(tmp_path), wanted + [make_document("mine"), make_document("last")])


def fill(path: Path, writer: str, started: Any) -> None:
    """In a process of its own: store what the cache lacks of this writer's documents, and tell when it begins."""
    with CacheWriter.open(path, STUB, "bfloat16", "test", writer, shard_tokens=300) as opened:
        started.set()
        for document in documents_of_writer(writer):
            if document["id"] not in opened.ids:
                opened.add(**document)


def documents_of_writer(writer: str) -> list[dict[str, Any]]:
    return [make_document(f"{writer}{i}", T=20 + 7 * (i % 40), seed=i) for i in range(150)]


def test_two_writers_killed_twenty_four_times(tmp_path: Path) -> None:
    """At any moment: the cache opens, all that was finished stays as it was, and the same commands complete it."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # a process that has imported all of this, forked anew each time
    context.set_forkserver_preload([__name__])
    moments = random.Random(0)
    stored: dict[str, str] = {}  # shard -> its sha256
    grew = 0
    for _ in range(24):
        started = [context.Event() for _ in "ab"]
        processes = [context.Process(target=fill, args=(tmp_path, *each)) for each in zip("ab", started, strict=True)]
        for process in processes:
            process.start()
        assert all(event.wait(60) for event in started)
        for process in moments.sample(processes, 2):
            time.sleep(moments.uniform(0, 0.04))
            process.kill()
            process.join()
        cache = Cache.open(tmp_path)
        assert all(faults == [] for faults in verify(cache))
        now = {cache.shard_path(shard).name: cache.shard_sha256(shard) for shard in range(cache.num_shards)}
        assert stored.items() <= now.items()
        grew += len(now) > len(stored)
        stored = now
    assert grew >= 3, "killed before anything was stored: the moments are badly chosen"
    for writer in "ab":
        fill(tmp_path, writer, context.Event())
    cache = Cache.open(tmp_path)
    assert all(faults == [] for faults in verify(cache))
    assert_stored(cache, [document for writer in "ab" for document in documents_of_writer(writer)])


def test_one_process_a_writer_name(tmp_path: Path) -> None:
    with CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:
        writer.add(**make_document("a"))
        with pytest.raises(ValueError, match="another process is writing"):
            CacheWriter.open(tmp_path, STUB, "float32", "test")
    write(tmp_path, [make_document("b")])
    assert len(Cache.open(tmp_path).documents) == 2
    with pytest.raises(ValueError, match="writer is '../x', expected a plain file name"):
        CacheWriter.open(tmp_path, STUB, "float32", "test", "../x")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past `size` bytes of any file fails, as on a full disk, after the bytes that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "large",
    [make_document("large", T=4000), make_document("large") | {"label": "x" * 40_000}],
    ids=["in the shard", "in the index"],
)
def test_a_full_disk_loses_nothing_that_was_stored(tmp_path: Path, large: dict[str, Any]) -> None:
    good = make_document("good")
    with (
        largest_file(20_000),
        pytest.raises(
            OSError,
            match=r"cannot store shards/main-00001.* MB are free there. The 1 shards before it are safe; free at least",
        ),
        CacheWriter.open(tmp_path, STUB, "float32", "test", shard_tokens=1) as writer,
    ):
        writer.add(**good)
        writer.add(**large)
    assert [file.name for file in (tmp_path / "shards").iterdir()] == ["main-00000.safetensors"]
    assert_stored(Cache.open(tmp_path), [good])
    write(tmp_path, [large])  # the same name, once there is space again
    assert_stored(Cache.open(tmp_path), [good, large])


def test_a_full_disk_shows_while_documents_are_added(tmp_path: Path) -> None:
    """A shard is stored while the next is filled, so the error comes with a document after it, and nothing is lost."""
    documents = [make_document(f"d{i}", T=4000 if i == 1 else 6, seed=i) for i in range(4)]
    writer = CacheWriter.open(tmp_path, STUB, "float32", "test", shard_tokens=1)
    with largest_file(20_000):
        writer.add(**documents[0])
        writer.add(**documents[1])
        with pytest.raises(OSError, match="cannot store shards/main-00001"):
            writer.add(**documents[2])
    writer.add(**documents[3])  # there is space again
    writer.close()
    assert_stored(Cache.open(tmp_path), documents)


def test_a_writer_goes_on_when_space_was_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    document = make_document("a")
    with CacheWriter.open(tmp_path, STUB, "float32", "test") as writer:
        writer.add(**document)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device") as caught:
            patch.setattr("medusa_k25.cache.writer.write_shard", full)
            writer.flush()
        assert caught.value.errno == errno.ENOSPC
        writer.flush()
    assert_stored(Cache.open(tmp_path), [document])


# Caches that are refused


def test_appending_with_another_target_or_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a")])
    others: list[Any] = [
        replace(STUB, name="other"),
        replace(STUB, quantisation="int4"),
        replace(STUB, fingerprints=STUB.fingerprints | {"tokenizer": "x"}),
    ]
    said = ["name: cache 'stub', target 'other'", r"quantisation \(none there, int4 here\)", "tokenizer"]
    for target, difference in zip(others, said, strict=True):
        with pytest.raises(ValueError, match=rf"cannot append to .*\({difference}\); capture into another"):
            CacheWriter.open(tmp_path, target, "float32", "test")
    with pytest.raises(ValueError, match="storage_dtype: cache 'float32', asked for 'bfloat16'"):
        CacheWriter.open(tmp_path, STUB, "bfloat16", "test")
    with pytest.raises(ValueError, match="storage_dtype is 'float64', expected one of float32"):
        CacheWriter.open(tmp_path / "new", STUB, "float64", "test")


def change_manifest(path: Path, **facts: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_a_folder_that_is_not_a_readable_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a cache: it has no manifest.json; make one with"):
        Cache.open(tmp_path / "nowhere")
    write(tmp_path, [make_document("a")])
    with pytest.raises(ValueError, match="is not a cache"):
        Cache.open(tmp_path / "manifest.json")
    whole = (tmp_path / "manifest.json").read_text()
    for facts, message in (
        ({"format_version": 2}, "format version 2, this code reads version 1; use the medusa_k25 that wrote it"),
        ({"final_norm_applied": False}, "before the final norm.*apply the norm when"),
        ({"storage_dtype": "int8"}, "storage_dtype is 'int8'"),
        ({"target": {}}, "target lacks"),
        ({"surprise": 1}, "surprise"),
    ):
        change_manifest(tmp_path, **facts)
        with pytest.raises(ValueError, match=message):
            Cache.open(tmp_path)
        (tmp_path / "manifest.json").write_text(whole)
    (tmp_path / "manifest.json").write_text(whole[:40])
    with pytest.raises(ValueError, match="is not JSON"):
        Cache.open(tmp_path)


def test_another_target_is_refused_and_both_are_named(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a")])
    Cache.open(tmp_path, STUB, check=False)
    for change, message in (
        ({"hidden_size": 16}, "hidden_size 8 != 16"),
        ({"vocab_size": 60}, "vocab_size 50 != 60"),
        ({"fingerprints": STUB.fingerprints | {"lm_head": "x", "tokenizer": "x"}}, "lm_head, tokenizer; choose"),
    ):
        with pytest.raises(
            ValueError, match=rf"target stub \(local\), which differs from target other .*in: {message}"
        ):
            Cache.open(tmp_path, replace(STUB, name="other", **change), check=False)


def resealed(line: str, **facts: Any) -> bytes:
    """A line of an index with other facts, whose checksum is right."""
    entry = json.loads(line) | facts
    del entry["line_sha256"]
    return sealed_line(entry)


def test_a_changed_manifest_or_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a"), make_document("b", seed=1)], shard_tokens=1)
    manifest, index = tmp_path / "manifest.json", tmp_path / "index/main.jsonl"
    whole = manifest.read_bytes(), index.read_bytes()
    for replace_in, old, new, message in (
        (manifest, b'"engine": "test"', b'"engine": "best"', "manifest.json is not the one that .*main.jsonl line 1"),
        (manifest, b"\n}", b" }", "manifest.json is not the one"),  # the same JSON, too
        (index, b'"prompt_length": 2', b'"prompt_length": 3', "main.jsonl line 1 is damaged: its checksum differs"),
        (index, b'"line_sha256": "', b'"Line_sha256": "', "line 1 is damaged"),
        (index, b"\n", b"\n\n", "line 2 is damaged"),
    ):
        replace_in.write_bytes(replace_in.read_bytes().replace(old, new, 1))
        for refuse in (Cache.open, lambda path: CacheWriter.open(path, STUB, "float32", "test")):
            with pytest.raises(ValueError, match=message):
                refuse(tmp_path)
        manifest.write_bytes(whole[0])
        index.write_bytes(whole[1])
    assert len(Cache.open(tmp_path).documents) == 2


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    documents = [make_document("a"), make_document("b", seed=1)]
    write(tmp_path, documents, shard_tokens=1)
    file, index = tmp_path / "shards/main-00001.safetensors", tmp_path / "index/main.jsonl"
    content, lines = file.read_bytes(), index.read_text().splitlines()

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=f"main-00001.safetensors.*{match}.*(restore the file)"):
            Cache.open(tmp_path)
        file.write_bytes(content)
        index.write_text("\n".join(lines) + "\n")

    def with_index(**facts: Any) -> None:
        index.write_bytes(lines[0].encode() + b"\n" + resealed(lines[1], **facts))

    file.unlink()
    refused("is missing, but the index lists it")
    for size in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:size])
        refused(f"has {size} bytes, the index says {len(content)}: truncated")
    file.write_bytes(content[:-4])  # the index may agree: the header does not
    with_index(bytes=len(content) - 4)
    refused(f"loss_mask ends at byte {len(content)}, the file has {len(content) - 4}")
    file.write_bytes(content[:50])
    with_index(bytes=50)
    refused("no readable safetensors header")
    file.write_bytes(content.replace(b'"I32"', b'"I64"'))
    refused("token_ids .* has 24 bytes")
    with_index(states=5)
    refused("disagrees with its line in the index about hidden, hidden_positions")
    facts = json.loads(lines[1])["documents"]
    with_index(documents=[facts[0] | {"length": 5}, facts[0] | {"id": "c", "length": 1, "states": 0}])
    refused("disagrees with its line in the index about document_starts")
    with_index(documents=[facts[0] | {"length": 5}])
    refused("disagrees with its line in the index about its documents")
    index.write_text(lines[0] + "\n" + lines[1][:30] + "\n" + lines[1] + "\n")
    with pytest.raises(ValueError, match="index/main.jsonl line 2 is damaged"):
        Cache.open(tmp_path)
    for line in (resealed(lines[1], documents=[facts[0] | {"groop": 1}]), resealed(lines[1], documents=7)):
        index.write_bytes(lines[0].encode() + b"\n" + line)
        with pytest.raises(ValueError, match="index/main.jsonl line 2 does not describe a shard"):
            Cache.open(tmp_path)
    index.write_text("\n".join(lines) + "\n")
    assert_stored(Cache.open(tmp_path), documents)


def test_a_shard_that_shrinks_after_opening_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a", T=3000)])
    cache = Cache.open(tmp_path)
    with cache.shard_path(0).open("ab") as file:
        file.truncate(40_000)
    with pytest.raises(ValueError, match="has become shorter than its index says"):
        cache.read_rows(0, 0, 3000)


def overwrite(cache: Cache, name: str, index: int, value: float) -> None:
    """Change a number in a shard on disk."""
    slot = cache._slots[0][name]
    with cache.shard_path(0).open("r+b") as file:
        file.seek(slot.start + index * slot.dtype.itemsize)
        file.write(torch.tensor(value).to(slot.dtype).numpy().tobytes())


@pytest.mark.parametrize(
    ("name", "index", "value", "at_open", "by_verify"),
    [
        ("hidden", 9 * D + 3, torch.nan, "'b'.* holds NaN or Inf in row 9", "'b': 1 states hold NaN or Inf"),
        ("token_ids", 7, V, "'b'.* has token ids from [0-9]+ to 50", "'b': token id 50 at position 1"),
        ("token_ids", 7, -1, "'b'.* has token ids from -1", "'b': token id -1 at position 1"),
        ("hidden_positions", 8, 7, None, "'b': positions are not strictly increasing"),
    ],
)
def test_damage_inside_a_shard_is_found(
    tmp_path: Path, name: str, index: int, value: float, at_open: str | None, by_verify: str
) -> None:
    write(tmp_path, [make_document("a"), make_document("b", seed=1)])
    overwrite(Cache.open(tmp_path), name, index, value)
    if at_open is not None:
        with pytest.raises(ValueError, match=at_open):
            Cache.open(tmp_path)
    [[changed, fault]] = verify(Cache.open(tmp_path, check=False))
    assert "sha256 differs" in changed
    assert fault.startswith(f"document {by_verify}")


def test_of_a_document_stored_twice_one_copy_counts(tmp_path: Path) -> None:
    writers = [CacheWriter.open(tmp_path, STUB, "float32", "test", name, shard_tokens=1) for name in ("one", "two")]
    for writer in writers:  # neither sees the other's document
        writer.add(**make_document("a"))
        writer.add(**make_document(writer.writer))
        writer.close()
    cache = Cache.open(tmp_path)
    assert_stored(cache, [make_document(id) for id in ("a", "one", "two")])
    assert cache.repeated == ["a"] and list(verify(cache)) == [[], [], [], []]


def test_a_cache_can_be_sent_to_another_process(tmp_path: Path) -> None:
    write(tmp_path, [make_document("a")])
    cache = Cache.open(tmp_path)
    data = pickle.dumps(cache)
    assert len(data) < 3000  # no tensors
    assert_stored(pickle.loads(data), [make_document("a")])


# The alignment of states and tokens


@dataclass(frozen=True)
class Texts:
    """Texts that a tiny target wrote, [B, T], and its states [B, T, D]."""

    target: Target
    prompt_length: int
    sampling: dict[str, Any]
    ids_BT: Tensor
    earlier_BTD: Tensor  # before the last layer
    before_BTD: Tensor
    after_BTD: Tensor
    dtype: str = "float32"  # of the model that wrote them
    engine: str = "test"

    def norm(self, hidden_BTD: Tensor) -> Tensor:
        mean_square = hidden_BTD.square().mean(dim=-1, keepdim=True)
        return hidden_BTD * (mean_square + self.target.norm_eps).rsqrt() * self.target.norm_weight.float()

    def capture(self, path: Path, hidden_BTD: Tensor, storage_dtype: str = "float32") -> Cache:
        B, T = self.ids_BT.shape
        with CacheWriter.open(path, self.target, storage_dtype, self.engine, shard_tokens=200) as writer:
            for i in range(B):
                positions_M = torch.arange(self.prompt_length - 1, T - 1)
                writer.add(
                    id=str(i),
                    group=None,
                    token_ids_T=self.ids_BT[i],
                    loss_mask_T=torch.arange(T) >= self.prompt_length,
                    hidden_MD=hidden_BTD[i, positions_M],
                    positions_M=positions_M,
                    prompt_length=self.prompt_length,
                    finish_reason="length",
                    sampling=self.sampling,
                    dtype=self.dtype,
                    label=None,
                    origin={},
                )
        return Cache.open(path, check=False)


@pytest.fixture(scope="module", params=["greedy", "temperature 0.7", "temperature 1"])
def texts(request: pytest.FixtureRequest, tiny_llama: Target) -> Texts:
    model = tiny_llama.load_model(torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompt_length, T = 4, 28
    ids_BT = torch.randint(tiny_llama.vocab_size, (24, prompt_length), generator=generator)
    while ids_BT.shape[1] < T:
        logits_BV = model.logits(model.hidden(ids_BT)[:, -1])
        if request.param == "greedy":
            next_B1 = logits_BV.argmax(dim=1, keepdim=True)
        else:
            temperature = float(request.param.split()[1])
            next_B1 = torch.multinomial((logits_BV / temperature).softmax(dim=1), 1, generator=generator)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    before: list[Tensor] = []
    hook = model.model.model.norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0].clone()))
    after_BTD = model.hidden(ids_BT)
    hook.remove()
    earlier_BTD = model.model.model(ids_BT, output_hidden_states=True).hidden_states[-2]
    temperature = 0.0 if request.param == "greedy" else float(request.param.split()[1])
    sampling = {"temperature": temperature, "top_p": 1.0}
    return Texts(tiny_llama, prompt_length, sampling, ids_BT, earlier_BTD, before[0], after_BTD)


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_aligned_states_pass_the_self_check(texts: Texts, tmp_path: Path, storage_dtype: str) -> None:
    cache = texts.capture(tmp_path, texts.after_BTD, storage_dtype)
    report = self_check(cache, texts.target)
    assert report.positions > 100
    assert report.agreement > 2 * max(report.agreement_with_current, report.agreement_with_second)
    assert 0.9 < report.rms_low <= report.rms_high < 1.02
    assert report.expected_agreement == pytest.approx(report.agreement, abs=0.12)
    assert self_check(cache, texts.target) == report  # the same positions every time
    assert self_check(cache, texts.target, max_positions=64).positions <= 64
    Cache.open(tmp_path, texts.target)


@pytest.mark.parametrize("storage_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("change", "seems"),
    [
        (lambda texts: texts.after_BTD.roll(1, 1), r"labels are shifted by -1 \(h_t predicts x_t\)"),
        (lambda texts: texts.after_BTD.roll(-1, 1), r"labels are shifted by \+1 \(h_t predicts x_\{t\+2\}\)"),
        (lambda texts: texts.before_BTD, r"the final norm is missing \(pre-norm states\)"),
        (lambda texts: texts.norm(texts.after_BTD), "the final norm was applied twice"),
        (lambda texts: texts.before_BTD.roll(-1, 1), r"the final norm is missing .* and labels are shifted by \+1"),
        (lambda texts: texts.after_BTD.flip(0), "no known convention"),  # states of other texts
        (lambda texts: texts.norm(texts.before_BTD.flip(2)), "no known convention"),  # states of another model
        (lambda texts: texts.after_BTD.roll(4, 1), "no known convention"),
        (
            lambda texts: texts.norm(texts.earlier_BTD),
            "states of an unknown layer|no known convention; an unknown layer",
        ),
    ],
    ids=["-1", "+1", "pre-norm", "norm twice", "pre-norm and +1", "other texts", "other model", "-4", "other layer"],
)
def test_the_self_check_names_what_the_data_seems_to_have(
    texts: Texts, tmp_path: Path, storage_dtype: str, change: Callable[[Texts], Tensor], seems: str
) -> None:
    texts.capture(tmp_path, change(texts), storage_dtype)
    with pytest.raises(ValueError, match=f"The data seems to have: {seems}"):
        Cache.open(tmp_path, texts.target)


@pytest.mark.parametrize("texts", ["greedy"], indirect=True)  # a random model's sampled text is too varied to tell
def test_another_numbering_of_the_tokens_is_named(texts: Texts, tmp_path: Path) -> None:
    """Every token means another one, as with another tokenizer of the same size."""
    order_V = torch.randperm(texts.target.vocab_size, generator=torch.Generator().manual_seed(1))
    replace(texts, ids_BT=order_V[texts.ids_BT]).capture(tmp_path, texts.after_BTD)
    with pytest.raises(ValueError, match="The data seems to have: token ids of another tokenizer"):
        Cache.open(tmp_path, texts.target)


@pytest.mark.parametrize("texts", ["greedy", "temperature 0.7"], indirect=True)
def test_states_too_sure_of_their_text_are_refused(texts: Texts, tmp_path: Path) -> None:
    """Aligned and normed, as those of another layer or revision may be: here, a quarter of them is noise."""
    generator = torch.Generator().manual_seed(2)
    noise_BTD = texts.norm(
        texts.before_BTD.flatten(0, 1)[torch.randperm(24 * 28, generator=generator)].view(24, 28, -1)
    )
    wrong_BT1 = torch.rand(24, 28, 1, generator=generator) < 0.3
    wrong_BTD = torch.where(wrong_BT1, noise_BTD, texts.after_BTD)
    texts.capture(tmp_path / "a", wrong_BTD)
    with pytest.raises(ValueError, match="states of an unknown layer, or of another revision of the target") as error:
        Cache.open(tmp_path / "a", texts.target)
    assert "bfloat16" not in str(error.value)
    replace(texts, dtype="bfloat16", engine="transformers 5, float32").capture(tmp_path / "b", wrong_BTD)
    with pytest.raises(ValueError, match="24 of 24 texts were generated in bfloat16, the states computed in float32"):
        Cache.open(tmp_path / "b", texts.target)


def test_text_of_unknown_sampling_passes(texts: Texts, tmp_path: Path) -> None:
    cache = replace(texts, sampling={"temperature": None, "top_p": None}).capture(tmp_path, texts.after_BTD)
    assert self_check(cache, texts.target).expected_agreement is None


@pytest.mark.parametrize(
    ("temperature", "top_p", "peak", "share", "wrong"),
    [
        (0.0, 1.0, 1.0, 1.0, False),
        (0.0, 1.0, 1.0, 0.93, False),  # bf16 text, fp8 states
        (0.0, 1.0, 1.0, 0.6, True),  # SmolLM2's layer before the last
        (1.0, 1.0, 0.54, 0.53, False),  # SmolLM2
        (1.0, 1.0, 0.58, 0.41, True),  # its layer before the last
        (1.0, 1.0, 0.54, 0.9, True),  # greedy text, said to be sampled
        (0.7, 0.95, 0.73, 0.77, False),
        (0.7, 0.6, 0.6, 0.95, False),  # a narrow nucleus may leave the first choice alone
        (math.nan, 1.0, 0.54, 1.0, False),  # greedy or sampled, nobody says
        (math.nan, 1.0, 0.54, 0.3, True),  # but not at any temperature up to 1
    ],
)
def test_how_often_the_first_choice_is_taken(
    temperature: float, top_p: float, peak: float, share: float, wrong: bool
) -> None:
    N = 500
    ranks_N3 = torch.ones(N, 3, dtype=torch.long)
    ranks_N3[: round(share * N), 1] = 0
    sample = Sample(torch.empty(N, 0), ranks_N3, torch.full((N,), temperature), torch.full((N,), top_p))
    expected, unlike = unlike_its_own_text(sample, Scores(ranks_N3, torch.full((N,), peak)))
    assert unlike == wrong
    assert expected == (None if math.isnan(temperature) else pytest.approx(peak))


def test_a_cache_without_labels_does_not_pass_the_self_check(texts: Texts, tmp_path: Path) -> None:
    CacheWriter.open(tmp_path / "empty", texts.target, "float32", "test").close()
    with pytest.raises(ValueError, match=r"every sampled answer is empty \(0 documents, 0 labels"):
        Cache.open(tmp_path / "empty", texts.target)
    same = replace(texts, ids_BT=torch.full_like(texts.ids_BT, 7))
    same.capture(tmp_path / "same", texts.after_BTD)
    with pytest.raises(ValueError, match="every sampled answer repeats one token"):
        Cache.open(tmp_path / "same", texts.target)
