"""The verb that looks into a cache: what it counts and shows, and that no changed byte escapes it."""

import hashlib
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from medusa_k25 import inspect
from medusa_k25.cache import Cache, CacheWriter, verify
from medusa_k25.checkpoint import write_heads
from medusa_k25.conversations import ends_in_loop
from medusa_k25.data.splits import SPLITS
from medusa_k25.data.windows import documents_of
from medusa_k25.reports.report import read_report
from medusa_k25.target import Target
from tests.test_cache import STUB, make_document
from tests.test_decode import fitted_heads, vocabulary_of
from tests.tiny import cache_of


@pytest.fixture(scope="module")
def sound(tiny_k25, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "cache"
    return cache_of(tiny_k25, folder, num_documents=24, shard_tokens=200, labels=("<code>", None))


@pytest.fixture
def cache(sound, tmp_path):
    return Cache(Path(shutil.copytree(sound.path, tmp_path / "cache")))


@pytest.fixture
def run(cache, tiny_k25, tmp_path, monkeypatch):
    """(options...) -> the exit status of the verb on the cache; its report is in tmp_path/run."""
    options = ["target=tiny_k25", f"target.home={tiny_k25.path.parent}", f"run_dir={tmp_path / 'run'}"]

    def main(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["inspect", *options, f"cache={cache.path}", *more])
        try:
            inspect.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return main


def flip(path: Path, offset: int, by: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= by
    path.write_bytes(content)


def test_a_sound_cache_is_counted_by_split_and_label(run, cache, tmp_path, capsys):
    assert run() == 0
    section = read_report(tmp_path / "run")["inspect"]
    assert section["shards"] == cache.num_shards > 2 and section["writers"] == {"main": cache.num_shards}
    assert section["fingerprint"] == cache.fingerprint
    assert (section["engine"], section["storage_dtype"], section["verify"]) == ("test", "float32", "sample")
    assert "damaged" not in section  # nobody looked
    assert list(section["splits"]) == list(SPLITS)
    for split in SPLITS:
        documents, part = documents_of(cache, split), section["splits"][split]
        assert part["documents"] == len(documents) > 0
        assert part["tokens"] == sum(document.length for document in documents)
        assert part["states"] == sum(len(cache.states(document)[0]) for document in documents)
        assert part["bytes"] == part["states"] * cache.hidden_size * 4
        answers = [cache.token_ids(document)[cache.loss_mask(document)].tolist() for document in documents]
        assert (part["answers"], part["answer_tokens"]) == (len(answers), sum(map(len, answers)))
        assert part["loops"] == sum(map(ends_in_loop, answers))
    total = section["total"]
    assert {label: part["documents"] for label, part in section["labels"].items()} == {"<code>": 12, "(no label)": 12}
    assert total == {key: sum(part[key] for part in section["splits"].values()) for key in total}
    assert (total["tokens"], total["states"]) == (cache.num_tokens, cache.num_states)
    assert section["lengths"]["answer"] == {"median": 24, "p95": 24, "max": 24}
    assert section["self_check"]["agreement"] > 0.99 and section["self_check"]["positions"] > 300
    shown = capsys.readouterr().out
    assert f"written by test with {cache.manifest.target['name']} (" in shown
    assert f"{total['tokens']:,}" in shown and "shards are sound" not in shown
    assert "at 504 positions the states predict the next token 100.0% of the time" in shown


def test_samples_show_what_the_mask_keeps(run, cache, tiny_k25, tmp_path, capsys):
    assert run() == 0
    tokenizer = tiny_k25.load_tokenizer()
    samples = read_report(tmp_path / "run")["inspect"]["samples"]
    documents = {document.id: document for document in cache.documents}
    shown = capsys.readouterr().out
    assert len(samples) == inspect.SAMPLES
    for sample in samples:
        ids, mask = (of(documents[sample["id"]]) for of in (cache.token_ids, cache.loss_mask))
        assert sample["pieces"] == [[False, tokenizer.decode(ids[~mask])], [True, tokenizer.decode(ids[mask])]]
        assert f"{tokenizer.decode(ids[~mask])}[[{tokenizer.decode(ids[mask])}]]" in shown


def test_without_a_tokenizer_samples_show_ids(run, cache, tmp_path, monkeypatch, capsys):
    def refuse(self: Target) -> None:
        raise ValueError("cannot load the tokenizer: no such file")

    monkeypatch.setattr(Target, "load_tokenizer", refuse)
    assert run() == 0
    ids = cache.token_ids(cache.documents[0]).tolist()
    [_, [kept, text]] = read_report(tmp_path / "run")["inspect"]["samples"][0]["pieces"]
    assert kept and text == " ".join(map(str, ids[cache.documents[0].prompt_length :]))
    assert "samples are shown as ids: cannot load the tokenizer" in capsys.readouterr().out


def test_the_page_is_one_self_contained_file(run, tmp_path):
    assert run() == 0
    page = (tmp_path / "run" / "inspect.html").read_text()
    assert page.count("<svg") == 6
    assert "<th>&lt;code&gt;</th><td>12</td>" in page and "<code>" not in page
    assert page.count("<mark>") == inspect.SAMPLES
    assert "shards, a sample was checked" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page.replace('xlink:href="#', ""))
    assert run("verify=full") == 0
    assert "every byte is as it was written" in (tmp_path / "run" / "inspect.html").read_text()


def test_a_sample_is_not_everything(run, cache, tmp_path, capsys):
    flip(cache.shard_path(0), cache.shard_bytes(0) // 2)  # a bit of one number
    assert run() == 0
    assert run("verify=full") == 1
    assert run("verify=all") == 1
    assert "verify=all: expected one of sample, full" in capsys.readouterr().err


def test_every_damaged_shard_is_named(run, cache, tmp_path, capsys):
    damaged = [cache.shard_path(shard) for shard in (0, cache.num_shards - 1)]
    for path in damaged:
        flip(path, -1)  # the last flag of the loss mask
    assert run("verify=full") == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith(
        f"error: 2 files of {cache.path} are damaged: {damaged[0]}, {damaged[1]}; restore them,"
    )
    assert out.count("its sha256 differs") == 2
    assert list(read_report(tmp_path / "run")["inspect"]["damaged"]) == [str(path) for path in damaged]


def test_a_full_check_finds_a_sound_cache_sound(run, cache, tmp_path, capsys):
    assert run("verify=full") == 0
    section = read_report(tmp_path / "run")["inspect"]
    assert (section["verify"], section["damaged"]) == ("full", {})
    usable = 0  # every position that can tell a shift
    for document in cache.documents:
        ids, mask = cache.token_ids(document).tolist(), cache.loss_mask(document).tolist()
        usable += sum(mask[t + 1] and ids[t] != ids[t + 1] != ids[t + 2] for t in range(len(ids) - 2))
    assert section["self_check"]["positions"] == usable > 504
    assert f"{cache.num_shards} of {cache.num_shards} shards are sound; wrote" in capsys.readouterr().out


def test_files_that_no_index_names_are_a_note(run, cache, tmp_path, capsys):
    left = [cache.path / "shards" / name for name in ("main-00099.safetensors", "other-00000.safetensors.tmp")]
    for file in left:
        file.write_bytes(bytes(1_500_000))
    assert run("verify=full") == 0
    assert read_report(tmp_path / "run")["inspect"]["unlisted"] == {str(file): 1_500_000 for file in left}
    assert f"note: {left[0]} (1.5 MB) is in no index" in capsys.readouterr().out
    assert "Files that no index names" in (tmp_path / "run" / "inspect.html").read_text()


def test_a_shard_that_cannot_be_opened_is_named(run, cache, capsys):
    cache.shard_path(1).write_bytes(b"")
    assert run() == 1
    assert f"shard {cache.shard_path(1)} has 0 bytes" in capsys.readouterr().err


def test_the_cost_of_fp8_is_told_with_the_runs_heads(run, cache, tiny_k25, tmp_path, capsys):
    assert run() == 0
    fp8 = read_report(tmp_path / "run")["inspect"]["fp8"]
    assert "heads" not in fp8 and "not measured with heads: no checkpoint in" in fp8["note"]
    assert fp8["positions"] == cache.num_states and 0.8 < fp8["same_argmax"] < 1

    record = {
        "target": {"name": tiny_k25.name, "revision": "", "fingerprints": tiny_k25.fingerprints},
        "metrics": {"calibration/speedup": 1.0},
    }
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    heads = fitted_heads(tiny_k25, cache)
    write_heads(folder, heads.state_dict(), heads, vocabulary_of(tiny_k25), record)
    assert run() == 0
    fp8 = read_report(tmp_path / "run")["inspect"]["fp8"]
    answers = len(documents_of(cache, "heldout"))
    for k, head in enumerate(fp8["heads"]):
        assert head["labels"] == answers * (23 - k)
        assert head["top1_fp8"] - head["top1"] == pytest.approx((head["gained"] - head["lost"]) / head["labels"])
        assert head["points"] == pytest.approx(100 * (head["top1_fp8"] - head["top1"]))
        assert head["points_error"] == pytest.approx(100 * (head["gained"] + head["lost"]) ** 0.5 / head["labels"])
        assert head["top1"] > 0.2
    assert len(fp8["heads"]) == heads.num_heads and "step-000001" in fp8["note"]
    assert "head 1             top-1" in capsys.readouterr().out
    page = (tmp_path / "run" / "inspect.html").read_text()
    assert "<th>head 1</th>" in page and page.count("<svg") == 7

    record["target"]["fingerprints"] = {"lm_head": "other", "final_norm": "other"}
    write_heads(folder, heads.state_dict(), heads, vocabulary_of(tiny_k25), record)
    assert run() == 0
    assert "was made for" in read_report(tmp_path / "run")["inspect"]["fp8"]["note"]


def test_on_an_fp8_cache_its_cost_cannot_be_measured(cache, run, tiny_k25, tmp_path, capsys):
    wide = [(document, *cache.states(document)) for document in cache.documents]
    stored = [(cache.token_ids(document).clone(), cache.loss_mask(document).clone()) for document in cache.documents]
    shutil.rmtree(cache.path)
    with CacheWriter.open(cache.path, tiny_k25, "float8_e4m3fn", "test") as writer:
        for (document, hidden_MD, positions_M), (ids_T, mask_T) in zip(wide, stored, strict=True):
            facts = ("id", "group", "prompt_length", "finish_reason", "sampling", "dtype", "label", "origin")
            writer.add(
                token_ids_T=ids_T,
                loss_mask_T=mask_T,
                hidden_MD=hidden_MD,
                positions_M=positions_M,
                **{name: getattr(document, name) for name in facts},
            )
    assert run("verify=full") == 0
    assert read_report(tmp_path / "run")["inspect"]["fp8"].keys() == {"note"}
    assert "as fp8               the states are stored as fp8: what that cost can only" in capsys.readouterr().out


# No byte changes unnoticed


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float8_e4m3fn"])
def small(request, tmp_path_factory):
    return write_small(tmp_path_factory.mktemp(request.param) / "cache", request.param)


def write_small(path: Path, storage_dtype: str) -> Path:
    for writer in ("one", "two"):
        with CacheWriter.open(path, STUB, storage_dtype, "test", writer, shard_tokens=12) as out:
            for i in range(4):
                out.add(**make_document(f"{writer}-{i}", seed=i))
    assert not damaged(path)
    return path


def damaged(path: Path) -> bool:
    try:
        return bool(inspect.damage(Cache.open(path, check=False)))
    except ValueError:  # refused before anybody looks for more
        return True


def assert_noticed(path: Path, file: Path, offset: int, by: int) -> None:
    content = file.read_bytes()
    flip(file, offset, by)
    noticed = damaged(path)
    file.write_bytes(content)
    assert noticed, f"{file.name}, byte {offset} of {len(content)} ({content[offset : offset + 1]!r}) changed by {by}"


def test_every_byte_of_manifest_and_index_counts(tmp_path):
    path, draw = write_small(tmp_path / "cache", "float8_e4m3fn"), random.Random(0)
    index = path / "index" / "one.jsonl"
    content = index.read_bytes()
    ends = [offset for offset, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 2
    for offset in range((path / "manifest.json").stat().st_size):
        assert_noticed(path, path / "manifest.json", offset, draw.randrange(1, 256))
    for offset in range(ends[0] - 1, len(content)):  # the last line
        assert_noticed(path, index, offset, draw.randrange(1, 256))
    for _ in range(40):
        assert_noticed(path, index, draw.randrange(ends[0]), draw.randrange(1, 256))
    for by in range(1, 256):  # a line without its end counts for nothing: any other byte there has to be noticed
        assert_noticed(path, index, ends[1], by)
    assert_noticed(path, index, ends[0], ord("\n") ^ ord("\r"))


def test_every_byte_of_a_shard_counts(small):
    draw = random.Random(1)
    shards = sorted((small / "shards").iterdir())
    assert len(shards) == 4
    for _ in range(200):
        file = draw.choice(shards)
        assert_noticed(small, file, draw.randrange(file.stat().st_size), draw.randrange(1, 256))


def test_an_unfinished_line_is_no_damage(small, tmp_path):
    path = Path(shutil.copytree(small, tmp_path / "cache"))
    index = path / "index" / "one.jsonl"
    content = index.read_bytes()
    last = content[content[:-1].rfind(b"\n") + 1 :]
    for written in (1, len(last) // 2, len(last) - 1):  # a writer that was killed while it wrote its third line
        index.write_bytes(content + last[:written])
        assert not damaged(path)


@pytest.mark.parametrize("block", [64, 4096])
def test_numbers_that_are_not_finite_are_found_in_any_block(small, tmp_path, monkeypatch, block):
    """The hash would tell; but a writer that stored them hashed them, too."""
    monkeypatch.setattr("medusa_k25.cache.check.SCAN_BYTES", block)
    path = Path(shutil.copytree(small, tmp_path / "cache"))
    cache = Cache.open(path, check=False)
    monkeypatch.setattr(Cache, "shard_sha256", lambda self, shard: digests[shard])
    digests: dict[int, str] = {}
    slots = cache._slots[1]
    columns = {name: slots[name] for name in ("hidden", "hidden_scales") if name in slots}
    values = {torch.float8_e4m3fn: [0x7F, 0xFF]}.get(cache.storage_dtype, [float("nan"), float("inf"), -float("inf")])
    for name, slot in columns.items():
        for value in values if name == "hidden" else [float("nan"), float("inf")]:
            for number in range(0, (slot.stop - slot.start) // slot.dtype.itemsize, 5):
                content = cache.shard_path(1).read_bytes()
                stored = torch.tensor(value, dtype=torch.uint8 if isinstance(value, int) else slot.dtype)
                offset = slot.start + number * slot.dtype.itemsize
                raw = stored.reshape(1).view(torch.uint8).numpy().tobytes()
                changed = content[:offset] + raw + content[offset + len(raw) :]
                cache.shard_path(1).write_bytes(changed)
                digests = {shard: _sha256(cache.shard_path(shard)) for shard in range(cache.num_shards)}
                row = number // (cache.hidden_size if name == "hidden" else 1)
                document = next(d for d in cache.documents if d.shard == 1 and d.row_start <= row < d.row_stop)
                faults = list(verify(cache))
                cache.shard_path(1).write_bytes(content)
                assert [len(found) for found in faults] == [0, 1, 0, 0]
                where = f"the first at position {row - document.row_start}"
                assert faults[1][0].startswith(f"document {document.id!r}: 1 states hold NaN or Inf, {where}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
