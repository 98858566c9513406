"""Capture: the cache holds what a plain forward pass over each conversation gives, at the positions it should."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.cache.capture import Capture, read_answers
from medusa_k25.conversations import Generator, prompt_key, read_conversations
from medusa_k25.prompts import Prompt
from medusa_k25.target import Target

TEXTS = ["Hi", "What is a fox?", "Name three rivers.", "Why?", "Tell me about the sea, in one short sentence, please."]
PROMPTS = [Prompt(f"p{i}", "art" if i else None, [{"role": "user", "content": text}]) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_k25"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Path]:
    """A target and its conversations: five answers, some of them ended by an end token, and a failed prompt."""
    target: Target = request.getfixturevalue(request.param)
    target = dataclasses.replace(target, end_ids=tuple(range(5, target.vocab_size, 12)))
    out = tmp_path_factory.mktemp("made") / "conversations.jsonl"
    empty = Prompt("empty", None, [{"role": "user", "content": ""}])
    generator = Generator(max_new_tokens=24, dtype="float32", template={"thinking": False})
    generator.run(target, [*PROMPTS, empty], out)
    return target, out


@pytest.fixture
def llama(tiny_llama: Target, tmp_path: Path) -> tuple[Target, Path]:
    Generator(max_new_tokens=24, dtype="float32").run(tiny_llama, PROMPTS, tmp_path / "conversations.jsonl")
    return tiny_llama, tmp_path / "conversations.jsonl"


def edit(path: Path, id: str, **changes: object) -> None:
    rows = [row | (changes if row["id"] == id else {}) for row in read_conversations(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("storage", ["answers", "all"])
def test_states_are_those_of_a_plain_forward(
    made: tuple[Target, Path], tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, conversations = made
    rows = {row["id"]: row for row in read_conversations(conversations) if "error" not in row}
    report = Capture(storage=storage, batch_tokens=150).run(target, conversations, tmp_path / "cache")
    cache = Cache.open(tmp_path / "cache", target)
    model = target.load_model(torch.float32)
    for document in cache.documents:
        row = rows.pop(document.id)
        P, T = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["answer_ids"])
        ids_T = torch.tensor(row["prompt_ids"] + row["answer_ids"])
        assert cache.token_ids(document).tolist() == ids_T.tolist()
        assert cache.loss_mask(document).tolist() == [False] * P + [True] * (T - P)
        hidden_MD, positions_M = cache.states(document)
        assert positions_M.tolist() == list(range(P - 1 if storage == "answers" else 0, T - 1))
        torch.testing.assert_close(hidden_MD, model.hidden(ids_T[None])[0, positions_M], atol=1e-4, rtol=1e-4)
        # greedy text: from the last prompt token on, every state predicts the token that follows
        answer_MD = hidden_MD[positions_M >= P - 1]
        assert model.logits(answer_MD).argmax(-1).tolist() == row["answer_ids"]
        assert (document.group, document.finish_reason) == (row["group"], row["finish_reason"])
        assert (document.sampling, document.dtype, document.prompt_length) == (row["sampling"], "float32", P)
        assert document.hash == prompt_key(row["prompt_ids"])
    assert not rows
    assert (report.stored, report.failed, report.short, report.states) == (5, 1, 0, cache.num_states)
    out = capsys.readouterr().out
    assert "5 stored + 0 stored before + 1 failed + 0 with an answer of one token = 6 conversations" in out
    assert report.check is not None and report.check.agreement == 1.0
    assert "the states predict the next token 100.0% of the time" in out


def test_the_loss_mask_decodes_to_the_answer(made: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = made
    Capture().run(target, conversations, tmp_path / "cache")
    tokenizer = target.load_tokenizer()
    cache = Cache.open(tmp_path / "cache")
    for document in cache.documents:
        row = next(row for row in read_conversations(conversations) if row["id"] == document.id)
        kept = cache.token_ids(document)[cache.loss_mask(document)].tolist()
        if document.finish_reason == "stop":
            assert kept.pop() in target.end_ids
        assert tokenizer.decode(kept) == row["answer"]
        assert tokenizer.decode(cache.token_ids(document)[: document.prompt_length]).endswith("<think></think>")


def test_an_interrupted_capture_continues(
    llama: tuple[Target, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the fourth document: what was in a finished shard stays, the rest comes with the next run."""
    target, conversations = llama
    capture = Capture(batch_tokens=1, shard_tokens=1)
    added: list[object] = []
    add = CacheWriter.add

    def failing_add(self: CacheWriter, **facts: object) -> None:
        if len(added) == 3:
            raise KeyboardInterrupt
        added.append(facts["id"])
        add(self, **facts)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(CacheWriter, "add", failing_add)
        with pytest.raises(KeyboardInterrupt):
            capture.run(target, conversations, tmp_path / "cache")
    assert [document.id for document in Cache.open(tmp_path / "cache").documents] == added
    report = capture.run(target, conversations, tmp_path / "cache")
    assert (report.stored, report.skipped) == (2, 3)
    capture.run(target, conversations, tmp_path / "whole")
    continued, whole = Cache.open(tmp_path / "cache", target), Cache.open(tmp_path / "whole", target)
    assert [document.id for document in continued.documents] == [document.id for document in whole.documents]
    for one, other in zip(continued.documents, whole.documents, strict=True):
        torch.testing.assert_close(continued.states(one), whole.states(other), atol=0, rtol=0)


def test_more_conversations_are_appended(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    Capture().run(target, conversations, tmp_path / "cache")
    more = Prompt("more", None, [{"role": "user", "content": "And then?"}])
    Generator(max_new_tokens=24, dtype="float32").run(target, [*PROMPTS, more], conversations)
    report = Capture().run(target, conversations, tmp_path / "cache")
    assert (report.stored, report.skipped) == (1, 5)
    assert [document.id for document in Cache.open(tmp_path / "cache").documents][-1] == "more"
    report = Capture().run(target, conversations, tmp_path / "cache")
    assert (report.stored, report.skipped, report.states) == (0, 6, 0)


def test_parts_fill_one_cache_and_never_store_twice(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    reports = [Capture(part=f"{i}/3").run(target, conversations, tmp_path / "cache") for i in (2, 1, 3)]
    assert [report.stored for report in reports] == [2, 2, 1]
    assert {file.stem for file in (tmp_path / "cache/index").iterdir()} == {f"part-{i}-of-3" for i in (1, 2, 3)}
    again = Capture().run(target, conversations, tmp_path / "cache")  # by another number of parts
    assert (again.stored, again.skipped) == (0, 5)
    Capture().run(target, conversations, tmp_path / "whole")
    parted, whole = Cache.open(tmp_path / "cache", target), Cache.open(tmp_path / "whole", target)
    states = {document.id: whole.states(document)[0] for document in whole.documents}
    assert states.keys() == {document.id for document in parted.documents} and len(parted.documents) == 5
    for document in parted.documents:
        torch.testing.assert_close(parted.states(document)[0], states[document.id], atol=1e-4, rtol=1e-4)


def test_a_part_without_conversations_is_no_fault(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    report = Capture(part="900/1000").run(target, conversations, tmp_path / "cache")
    assert (report.stored, report.skipped, report.check) == (0, 0, None)


def test_parts_of_another_number_are_refused_while_one_is_at_work(llama: tuple[Target, Path], tmp_path: Path) -> None:
    """Neither sees what the other stores: both would store the same conversations."""
    target, conversations = llama
    cache = tmp_path / "cache"
    with CacheWriter.open(cache, target, "float32", "test", "part-1-of-2"):
        for part in ("1/1", "1/3"):
            with pytest.raises(ValueError, match=f"is filling {cache} in 2 parts, this one would in {part[2]}: both"):
                Capture(part=part).run(target, conversations, cache)
        Capture(part="2/2").run(target, conversations, cache)
    assert Capture().run(target, conversations, cache).stored == 3


def test_loops_and_cut_answers_are_counted_and_left_out_on_demand(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    edit(conversations, "p1", answer_ids=[7, 8] * 20, finish_reason="length")
    for id in ("p0", "p2", "p3"):
        edit(conversations, id, finish_reason="stop", answer_ids=[9, 10, 11])
    edit(conversations, "p4", finish_reason="length", answer_ids=[9, 10, 11])

    def stored(leave_out: list[str], name: str) -> set[str]:
        with pytest.raises(ValueError, match="not aligned"):  # this is not the target's text
            Capture(leave_out=leave_out).run(target, conversations, tmp_path / name)
        return {document.id for document in Cache.open(tmp_path / name).documents}

    assert stored([], "all") == {"p0", "p1", "p2", "p3", "p4"}
    assert stored(["loop"], "no loops") == {"p0", "p2", "p3", "p4"}
    assert stored(["loop", "cut"], "whole") == {"p0", "p2", "p3"}
    counts = read_answers(conversations, target, ["cut"]).counts
    assert counts == {"failed": 0, "short": 0, "left_out": 2, "loops": 1, "cut": 2}
    for wrong in (["loops"], "loop"):
        with pytest.raises(ValueError, match="leave_out is .*, expected a list of some of loop, cut"):
            Capture(leave_out=wrong)


def test_a_dry_run_writes_nothing(
    llama: tuple[Target, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, conversations = llama
    states = sum(len(row["answer_ids"]) for row in read_conversations(conversations))
    Capture().plan(target, conversations, tmp_path / "deep/cache")
    assert not (tmp_path / "deep").exists()
    assert f"5 conversations, {states} states x 268 bytes" in capsys.readouterr().out


def test_batches_respect_the_budget() -> None:
    rows = [{"id": str(n), "prompt_ids": [1], "answer_ids": [2] * (n - 1)} for n in (5, 90, 30, 31, 29, 6, 2, 2)]
    batches = list(Capture(batch_tokens=60)._batches(rows))
    sizes = [[1 + len(row["answer_ids"]) for row in batch] for batch in batches]
    assert sizes == [[90], [31], [30, 29], [6, 5, 2, 2]]


def test_answers_of_one_token_are_left_out(llama: tuple[Target, Path], tmp_path: Path) -> None:
    """The prefill pass gives the first token, so there is no verify pass to learn from."""
    target, conversations = llama
    edit(conversations, "p1", answer_ids=[7])
    edit(conversations, "p2", answer_ids=[])
    report = Capture().run(target, conversations, tmp_path / "cache")
    assert (report.stored, report.short) == (3, 2)
    assert {document.id for document in Cache.open(tmp_path / "cache").documents} == {"p0", "p3", "p4"}
    for id in ("p0", "p3", "p4"):
        edit(conversations, id, answer_ids=[7])
    with pytest.raises(ValueError, match="no answer of two tokens or more"):
        Capture().run(target, conversations, tmp_path / "other")


def test_text_of_another_tokenizer_is_refused(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    edit(conversations, "p3", answer_ids=[7, target.vocab_size])
    with pytest.raises(ValueError, match="'p3' has token ids from .* to 512, target .* has 0 to 511"):
        Capture().run(target, conversations, tmp_path / "cache")
    edit(conversations, "p3", answer_ids=[7, 8], prompt_ids=[])
    with pytest.raises(ValueError, match="'p3' has no prompt"):
        Capture().run(target, conversations, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_text_that_the_target_did_not_write_fails_the_check(llama: tuple[Target, Path], tmp_path: Path) -> None:
    target, conversations = llama
    for row in read_conversations(conversations):
        edit(conversations, row["id"], answer_ids=[(7 * t + 3) % 500 for t in range(24)])
    with pytest.raises(ValueError, match="not aligned as expected"):
        Capture().run(target, conversations, tmp_path / "cache")


def test_a_small_disk_is_refused_before_the_start(
    llama: tuple[Target, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, conversations = llama
    answers = sum(len(row["answer_ids"]) for row in read_conversations(conversations))
    monkeypatch.setattr(Target, "load_model", lambda *_: pytest.fail("the model was loaded"))
    usage = shutil.disk_usage(tmp_path)._replace(free=answers * target.hidden_size * 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=rf"{answers} states of 268 bytes, its disk has"):
        Capture().run(target, conversations, tmp_path / "cache")
    assert f"{answers} states x 268 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8_e4m3fn"])
def test_narrow_storage(llama: tuple[Target, Path], tmp_path: Path, storage_dtype: str) -> None:
    target, conversations = llama
    Capture().run(target, conversations, tmp_path / "wide")
    Capture(storage_dtype=storage_dtype, compute_dtype="bfloat16").run(target, conversations, tmp_path / "narrow")
    wide, narrow = Cache.open(tmp_path / "wide"), Cache.open(tmp_path / "narrow")
    assert narrow.manifest.engine.endswith("bfloat16")
    for one, other in zip(wide.documents, narrow.documents, strict=True):
        a, b = wide.states(one)[0], narrow.states(other)[0].float()
        assert torch.cosine_similarity(a, b).min() > 0.97


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"storage": "answer"}, "expected one of answers, all"),
        ({"storage_dtype": "fp8"}, "expected one of float32"),
        *(({"part": part}, "expected I/N with I from 1 to N") for part in ("0/2", "3/2", "2", "1/2/3", "a/b")),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capture(**setting)  # type: ignore[arg-type]
