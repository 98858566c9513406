"""Staging: reading is never slower, never wrong, and never needs it; whatever happens to the one that copies."""

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from medusa_k25.cache import Cache, staging
from medusa_k25.cache.staging import Stage
from medusa_k25.data.sampler import Share
from medusa_k25.data.windows import Windows
from tests.test_cache import make_document, write

SHARDS = 5


def make_cache(path: Path, seed: int = 0) -> Cache:
    write(path, [make_document(f"d{i}", T=40, seed=seed + i) for i in range(SHARDS)], "bfloat16", shard_tokens=1)
    return Cache.open(path)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return make_cache(tmp_path / "cache")


def all_states(cache: Cache) -> Tensor:
    return torch.cat([cache.states(document)[0] for document in cache.documents])


def stage_of(cache: Cache, folder: Path, max_bytes: float = 1e9) -> Stage:
    return Stage(cache, folder, max_bytes, range(cache.num_shards))


def copied(stage: Stage) -> Stage:
    """The stage, once it has ended by itself."""
    stage.start()
    if stage._thread is not None:
        stage._thread.join(30)
    stage.stop()
    return stage


def lose_states(cache: Cache, shard: int) -> None:
    """Zeros for the states of an original: whoever reads them has not read a copy."""
    slot = cache._slots[shard]["hidden"]
    with cache.shard_path(shard).open("r+b") as file:
        file.seek(slot.start)
        file.write(bytes(slot.stop - slot.start))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_states_are_read_from_copies_by_every_process(cache: Cache, tmp_path: Path) -> None:
    before, files = all_states(cache), {p: p.read_bytes() for p in cache.path.rglob("*") if p.is_file()}
    windows = Windows(cache, cache.documents, 16, 3)
    shares = [Share([i], torch.zeros(3)) for i in range(len(windows))]
    batches = [windows[share] for share in shares]
    reopened = Cache.open(cache.path)
    stage = copied(stage_of(cache, tmp_path / "stage"))
    assert stage.state == "done" and stage.staged() == list(range(SHARDS)) and not stage.refused
    assert {p: p.read_bytes() for p in cache.path.rglob("*") if p.is_file()} == files  # and no file more
    for shard in range(SHARDS):
        lose_states(cache, shard)
    assert not torch.equal(all_states(reopened), before)  # not staged
    assert torch.equal(all_states(cache), before)
    assert torch.equal(all_states(pickle.loads(pickle.dumps(cache))), before)
    other_rank = Cache.open(cache.path)
    stage_of(other_rank, tmp_path / "stage")
    assert torch.equal(all_states(other_rank), before)
    loader: DataLoader = DataLoader(windows, batch_size=None, sampler=shares, num_workers=2)
    assert all(torch.equal(a.hidden_ND, b.hidden_ND) for a, b in zip(loader, batches, strict=True))


def test_reading_does_not_wait_for_a_slow_source_and_takes_copies_as_they_come(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = all_states(cache), staging.blocks
    go = threading.Semaphore(0)

    def slow(path: Path) -> Iterator[memoryview]:
        for block in real(path):
            assert go.acquire(timeout=30)
            yield block

    monkeypatch.setattr(staging, "blocks", slow)
    stage = stage_of(cache, tmp_path / "stage")
    stage.start()
    assert torch.equal(all_states(cache), before) and stage.staged() == []
    for shard in range(2):
        go.release()
        wait_for(lambda shard=shard: len(stage.staged()) == shard + 1)  # type: ignore[misc]
        lose_states(cache, shard)
        assert torch.equal(all_states(cache), before)
    go.release()
    stage.stop()
    assert stage.state in ("stopped", "copying") and len(stage.staged()) in (2, 3)
    assert f"{len(stage.staged())} of 5 shards" in str(stage)
    assert not list((tmp_path / "stage").rglob("*.tmp"))


def test_a_copy_that_is_not_what_was_written_is_refused_and_reported(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, real = all_states(cache), staging.blocks

    def flips_a_bit(path: Path) -> Iterator[memoryview]:
        for block in real(path):
            if path == cache.shard_path(2):
                block[len(block) // 2] ^= 1
            yield block

    monkeypatch.setattr(staging, "blocks", flips_a_bit)
    with caplog.at_level(logging.WARNING, "medusa_k25"):
        stage = copied(stage_of(cache, tmp_path / "stage"))
    assert stage.staged() == [0, 1, 3, 4] and stage.refused == [cache.shard_path(2)]
    assert f"1 refused: {cache.shard_path(2)}" in str(stage)
    assert f"{cache.shard_path(2)} is not staged: its sha256" in caplog.text
    assert torch.equal(all_states(cache), before)
    assert not list((tmp_path / "stage").rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["vanishes", "is cut", "is cut behind its header", "is a folder"])
def test_a_copy_that_goes_is_not_missed(cache: Cache, tmp_path: Path, damage: str) -> None:
    before = all_states(cache)
    stage = copied(stage_of(cache, tmp_path / "stage"))
    assert torch.equal(all_states(cache), before) and cache._staged == set(range(SHARDS))
    copy = stage._path(1)
    if damage.startswith("is cut"):
        os.truncate(copy, 0 if damage == "is cut" else copy.stat().st_size // 2)
    else:
        copy.unlink()
        if damage == "is a folder":
            copy.mkdir()
    assert torch.equal(all_states(cache), before)
    assert cache._staged == {0, 2, 3, 4}
    assert torch.equal(all_states(cache), before)
    shutil.rmtree(tmp_path / "stage")
    assert torch.equal(all_states(cache), before)


def test_the_folder_is_bounded_and_other_caches_make_room(cache: Cache, tmp_path: Path) -> None:
    size, folder = cache.shard_bytes(0), tmp_path / "stage"
    other = make_cache(tmp_path / "other", seed=50)
    assert other.shard_bytes(0) == size
    (folder / ("0" * 16) / "shards").mkdir(parents=True)  # a folder of somebody else's, without a lock
    before = all_states(cache)

    stage = copied(stage_of(cache, folder, 3.5 * size))
    assert stage.state == "full" and stage.staged() == [0, 1, 2]
    assert torch.equal(all_states(cache), before)
    assert copied(Stage(other, folder, 4 * size, [4, 3])).staged() == [4, 3]  # all of the first had to go
    assert stage.staged() == []
    held = staging.locked(folder / other.fingerprint[:16])
    assert held is not None
    stage = copied(stage_of(cache, folder, 3.5 * size))
    assert stage.state == "full" and stage.staged() == [0]  # the held one stays
    held.close()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(
        ["0" * 16, cache.fingerprint[:16], other.fingerprint[:16]]
    )


def test_the_local_disk_is_never_filled(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, size = 100_000, cache.shard_bytes(0)

    def usage(path: Path) -> shutil._ntuple_diskusage:
        used = sum(file.stat().st_size for file in (tmp_path / "stage").rglob("*.safetensors"))
        return shutil._ntuple_diskusage(total, used, 5_000 + 2 * size - used)

    monkeypatch.setattr(staging.shutil, "disk_usage", usage)
    stage = copied(stage_of(cache, tmp_path / "stage"))
    assert stage.state == "full" and stage.staged() == [0, 1]


def test_an_error_of_the_local_disk_ends_staging_not_reading(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = all_states(cache)

    def fails(path: Path) -> Iterator[memoryview]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(staging, "blocks", fails)
    stage = copied(stage_of(cache, tmp_path / "stage"))
    assert "stopped by an error: [Errno 5]" in str(stage)
    assert "no further shards are staged" in caplog.text
    assert torch.equal(all_states(cache), before)


def test_one_process_a_machine_copies(cache: Cache, tmp_path: Path) -> None:
    first, second = (stage_of(cache, tmp_path / "stage") for _ in range(2))
    (tmp_path / "stage").mkdir()
    held = staging.locked(first.folder)
    assert held is not None
    assert copied(second).state == "another run copies"
    held.close()
    assert copied(first).state == "done"
    assert second.staged() == list(range(SHARDS))


KILLED = """
import sys, time
from pathlib import Path
from medusa_k25.cache import Cache, staging

real = staging.blocks

def slow(path):
    for block in real(path):
        half = len(block) // 2
        yield block[:half]
        if path == cache.shard_path(2):
            print("in the middle", flush=True)
            time.sleep(60)
        yield block[half:]

staging.blocks = slow
cache = Cache.open(sys.argv[1])
stage = staging.Stage(cache, Path(sys.argv[2]), 1e9, range(cache.num_shards))
stage.start()
stage._thread.join()
"""


def test_what_a_killed_run_has_copied_is_used_again(cache: Cache, tmp_path: Path) -> None:
    before, folder = all_states(cache), tmp_path / "stage"
    command = [sys.executable, "-c", KILLED, str(cache.path), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"in the middle\n"
        process.send_signal(signal.SIGKILL)
    stage = stage_of(cache, folder)
    [left] = folder.rglob("*.tmp")
    assert left.name == "main-00002.tmp"
    assert stage.found == [0, 1]
    assert torch.equal(all_states(cache), before)
    inodes = [stage._path(shard).stat().st_ino for shard in stage.found]
    copied(stage)
    assert stage.staged() == list(range(SHARDS)) and not left.exists()
    assert [stage._path(shard).stat().st_ino for shard in stage.found] == inodes  # not copied again
    assert "2 of them from an earlier run" in str(stage)


def test_a_cache_that_has_grown_is_staged_anew(cache: Cache, tmp_path: Path) -> None:
    copied(stage_of(cache, tmp_path / "stage"))
    write(cache.path, [make_document("more", seed=99)], "bfloat16")
    grown = Cache.open(cache.path)
    stage = stage_of(grown, tmp_path / "stage")
    assert stage.found == [] and stage.folder.name == grown.fingerprint[:16]


@pytest.mark.parametrize(
    ("folder", "max_bytes", "message"), [("cache/x", 1, "lies in the cache"), ("x", 0, "more than 0")]
)
def test_a_stage_that_cannot_be_is_refused(
    cache: Cache, tmp_path: Path, folder: str, max_bytes: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stage_of(cache, tmp_path / folder, max_bytes)
