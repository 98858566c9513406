"""The verb that looks into a cache: what it counts, and what it says of a damaged one."""

import shutil
import sys
from pathlib import Path

import pytest

from medusa_k25 import inspect
from medusa_k25.cache import Cache
from medusa_k25.conversations import ends_in_loop
from medusa_k25.data.splits import SPLITS
from medusa_k25.data.windows import documents_of
from medusa_k25.report import read_report
from tests.tiny import cache_of


@pytest.fixture(scope="module")
def sound(tiny_k25, tmp_path_factory):
    return cache_of(tiny_k25, tmp_path_factory.mktemp("inspect") / "cache", num_documents=24, shard_tokens=200)


@pytest.fixture
def cache(sound, tmp_path):
    return Cache(Path(shutil.copytree(sound.path, tmp_path / "cache")))


@pytest.fixture
def run(cache, tiny_k25, tmp_path, monkeypatch):
    """() -> the exit status of the verb on the cache; its report is in tmp_path/run."""
    options = ["target=tiny_k25", f"target.home={tiny_k25.path.parent}", f"cache={cache.path}"]
    monkeypatch.setattr(sys, "argv", ["inspect", *options, f"run_dir={tmp_path / 'run'}"])

    def main() -> int:
        try:
            inspect.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return main


def test_a_sound_cache_is_counted_by_split_and_label(run, cache, tmp_path, capsys):
    assert run() == 0
    section = read_report(tmp_path / "run")["inspect"]
    assert section["damaged"] == {} and section["shards"] == cache.num_shards > 2
    assert section["fingerprint"] == cache.fingerprint
    assert (section["engine"], section["storage_dtype"]) == ("test", "float32")
    assert list(section["splits"]) == list(SPLITS)
    for split in SPLITS:
        documents, part = documents_of(cache, split), section["splits"][split]
        assert part["documents"] == len(documents) > 0
        assert part["tokens"] == sum(document.length for document in documents)
        assert part["states"] == sum(len(cache.states(document)[0]) for document in documents)
        assert part["bytes"] == part["states"] * cache.hidden_size * 4
        answers = [cache.token_ids(document)[cache.loss_mask(document)].tolist() for document in documents]
        assert part["answer_tokens"] == sum(map(len, answers))
        assert part["loops"] == sum(map(ends_in_loop, answers))
    total = section["total"]
    assert section["labels"] == {"(no label)": total}
    assert total == {key: sum(part[key] for part in section["splits"].values()) for key in total}
    assert (total["tokens"], total["states"]) == (cache.num_tokens, cache.num_states)
    shown = capsys.readouterr().out
    assert f"written by test with {cache.manifest.target['name']} (" in shown
    assert f"{total['tokens']:,}" in shown and f"{cache.num_shards} of {cache.num_shards} shards are sound" in shown


def test_every_damaged_shard_is_named(run, cache, tmp_path, capsys):
    damaged = [cache.shard_path(shard) for shard in (0, cache.num_shards - 1)]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # the last flag of the loss mask
        path.write_bytes(content)
    assert run() == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith(
        f"error: 2 of {cache.num_shards} shards are damaged: {damaged[0]}, {damaged[1]};"
    )
    assert out.count("its sha256 differs") == 2
    assert list(read_report(tmp_path / "run")["inspect"]["damaged"]) == [str(path) for path in damaged]


def test_a_shard_that_cannot_be_opened_is_named(run, cache, capsys):
    cache.shard_path(1).write_bytes(b"")
    assert run() == 1
    assert f"shard {cache.shard_path(1)} has 0 bytes" in capsys.readouterr().err


def test_labels_are_added_up_apart():
    one, two = inspect.Contents(1, 10, 5, 5, 20, 0), inspect.Contents(1, 8, 4, 4, 16, 1)
    sums = inspect.add_up([("code", one), ("chat", two), ("code", two)], ["chat", "empty"])
    assert sums == {"chat": two, "empty": inspect.Contents(), "code": inspect.Contents(2, 18, 9, 9, 36, 1)}
    assert [line.split()[0] for line in inspect.table("label", sums).strip().splitlines()] == ["label", *sums]
