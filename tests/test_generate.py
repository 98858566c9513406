"""Generation: the target's own greedy text, resumable, every prompt accounted for."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_k25 import conversations
from medusa_k25.conversations import GenerateReport, Generator, ends_in_loop, prompt_key, read_conversations
from medusa_k25.data.splits import split_of
from medusa_k25.prompts import KINDS, Prompt, kind_of, load_prompts
from medusa_k25.target import Target

TEXTS = ["Hi", "What is a fox?", "Name three rivers.", "Why?", "Tell me about the sea, in one short sentence, please."]
PROMPTS = [Prompt(f"p{i}", None, [{"role": "user", "content": text}]) for i, text in enumerate(TEXTS)]


def often_ending(target: Target) -> Target:
    """The same target; every eighth token ends an answer, so that rows leave the batch at different steps."""
    return dataclasses.replace(target, end_ids=tuple(range(5, target.vocab_size, 8)))


@pytest.fixture(params=["tiny_llama", "tiny_k25"])
def target(request: pytest.FixtureRequest) -> Target:
    return often_ending(request.getfixturevalue(request.param))


@pytest.fixture
def llama(tiny_llama: Target) -> Target:
    return often_ending(tiny_llama)


def answers_of(path: Path) -> dict[str, list[int]]:
    return {row["id"]: row["answer_ids"] for row in read_conversations(path)}


# --- prompts


def test_the_shipped_prompts_load() -> None:
    prompts = load_prompts("package")
    assert len(prompts) == 502
    assert all(prompt.group and prompt.messages[-1]["role"] == "user" for prompt in prompts)


def test_the_prompts_of_the_study_are_the_shipped_ones_and_a_crossing() -> None:
    prompts = load_prompts("study")
    assert prompts[:502] == load_prompts("package")
    crossed = {prompt.id: prompt for prompt in prompts[502:]}
    assert len(crossed) == 2692
    assert crossed["sql-00-01"].messages[0]["content"] == "What goes wrong in practice with joining two tables in SQL?"
    topics = {prompt.group for prompt in prompts}
    assert {topic for some in KINDS.values() for topic in some} <= topics
    heldout = {kind_of(topic) for topic in topics if split_of(topic, "") == "heldout"}
    assert heldout == {"code", "maths", "other"}


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_every_shape(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]
    source = write_lines(
        tmp_path / "rows.jsonl",
        {"id": 7, "topic": "cooking", "prompt": "Hi"},
        "",
        {"group": "art", "messages": [*chat, {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]},
        {"messages": chat},
    )
    first, second, third = load_prompts(source)
    assert first == Prompt("7", "cooking", [{"role": "user", "content": "Hi"}])
    assert (second.group, [message["content"] for message in second.messages]) == ("art", ["a\u2028b", "c", "d"])
    assert third.messages == chat[:1]
    assert len({second.id, third.id}) == 2
    assert load_prompts(source) == [first, second, third]

    table = pyarrow.Table.from_pylist([{"topic": "cooking", "prompt": "Hi"}, {"topic": None, "prompt": "Ho"}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    hi, ho = load_prompts(str(tmp_path / "rows.parquet"))
    assert (hi.group, hi.messages, ho.group) == ("cooking", [{"role": "user", "content": "Hi"}], None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        ([{"prompt": "a"}, '{"prompt": "b'], r"rows.jsonl:2 is not valid JSON"),
        ([{"prompt": "a"}, [1]], r"rows.jsonl:2: expected an object, got list"),
        ([{"question": "a"}], r"rows.jsonl:1: expected \"prompt\" as text .* got the keys \['question'\]"),
        ([{"messages": [{"role": "user"}]}], r"rows.jsonl:1: expected"),
        ([{"messages": [{"role": "system", "content": "a"}]}], r"rows.jsonl:1: none of the 1 messages"),
        ([{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}], r"rows.jsonl:2: id 'x' was already used at .*:1"),
        ([{"prompt": "a"}, {"prompt": "a"}], r"rows.jsonl:2: id"),
    ],
)
def test_broken_prompts_are_refused(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(write_lines(tmp_path / "rows.jsonl", *rows))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_prompt_file_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match="no prompts at"):
        load_prompts(str(tmp_path / f"absent.{suffix}"))


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        load_prompts(str(tmp_path / "rows.parquet"))


def test_a_data_set_is_only_fetched_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    offline = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        return [{"prompt": f"{name} {split}"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    assert load_prompts("org/chats")[0].messages[0]["content"] == "org/chats train"
    load_prompts("org/chats", download=True)
    assert offline == [True, False]
    assert datasets.config.HF_HUB_OFFLINE is False


def test_an_absent_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="nor a dataset that could be loaded .*fetch it once"):
        load_prompts("nobody/has-this")


# --- text


@pytest.mark.parametrize("batch_size", [2, 5])
def test_greedy_text_is_that_of_transformers(target: Target, tmp_path: Path, batch_size: int) -> None:
    generator = Generator(max_new_tokens=24, batch_size=batch_size, dtype="float32")
    report = generator.run(target, PROMPTS, tmp_path / "c.jsonl")
    tokenizer, model = target.load_tokenizer(), target.load_model(torch.float32).model
    rows = read_conversations(tmp_path / "c.jsonl")
    lengths = set()
    for row in rows:
        ids = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_tensors="pt")
        assert row["prompt_ids"] == ids["input_ids"][0].tolist()
        whole = model.generate(
            **ids, do_sample=False, max_new_tokens=24, eos_token_id=list(target.end_ids), pad_token_id=0
        )
        assert row["answer_ids"] == whole[0, len(row["prompt_ids"]) :].tolist()
        stopped = row["answer_ids"][-1] in target.end_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert row["answer"] == tokenizer.decode(row["answer_ids"][:-1] if stopped else row["answer_ids"])
        lengths.add(len(row["answer_ids"]))
    assert len(lengths) >= 3, "the rows were to end at different steps"
    assert (report.success, report.failed, report.skipped) == (5, 0, 0)
    assert report.tokens == sum(len(row["answer_ids"]) for row in rows)


def test_modes_of_the_chat_template_are_prompt(tiny_k25: Target, tmp_path: Path) -> None:
    """The prefilled <think></think>, or <think>, is read from the prompt and never part of the answer."""
    tokenizer = tiny_k25.load_tokenizer()
    for thinking, prefilled in ((False, "<think></think>"), (True, "<think>")):
        out = tmp_path / f"{thinking}.jsonl"
        Generator(max_new_tokens=2, template={"thinking": thinking}).run(tiny_k25, PROMPTS[:1], out)
        (row,) = read_conversations(out)
        assert tokenizer.decode(row["prompt_ids"]).endswith(f"<|im_middle|>{prefilled}")
        assert len(row["answer_ids"]) <= 2


def test_equal_logits_give_the_lowest_id() -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert Generator()._choose(logits_BV, torch.zeros(2)).tolist() == [1, 0]


def test_sampling_follows_the_distribution() -> None:
    probs_V = torch.tensor([0.1, 0.45, 0.15, 0.3])
    draws_B = (torch.arange(4000) + 0.5).double() / 4000  # every quantile once
    logits_BV = (probs_V.log() * 2).expand(4000, -1)
    shares_V = Generator(temperature=2.0)._choose(logits_BV, draws_B).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares_V, probs_V, atol=1e-3, rtol=0)
    # the nucleus of 0.8 is {0.45, 0.3, 0.15}: the smallest set that reaches it
    shares_V = Generator(temperature=2.0, top_p=0.8)._choose(logits_BV, draws_B).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares_V, torch.tensor([0, 0.5, 1 / 6, 1 / 3]), atol=1e-3, rtol=0)


def test_sampled_text_depends_on_seed_and_prompt_only(llama: Target, tmp_path: Path) -> None:
    texts = []
    for name, seed, batch_size, prompts in (("a", 1, 5, PROMPTS), ("b", 1, 2, PROMPTS[::-1]), ("c", 2, 5, PROMPTS)):
        # bf16 sums depend on the batch
        generator = Generator(max_new_tokens=8, temperature=1.0, seed=seed, batch_size=batch_size, dtype="float32")
        generator.run(llama, prompts, tmp_path / name)
        texts.append(answers_of(tmp_path / name))
    assert texts[0] == texts[1] != texts[2]
    assert read_conversations(tmp_path / "a")[0]["sampling"] == {"mode": "sampled", "temperature": 1.0, "top_p": 1.0}


def test_the_heldout_split_is_generated_in_its_own_dtype(llama: Target, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{i}", None, [{"role": "user", "content": str(i)}]) for i in range(30)]
    Generator(max_new_tokens=2, dtype="bfloat16").run(llama, prompts, tmp_path / "c.jsonl")
    rows = read_conversations(tmp_path / "c.jsonl")
    for row in rows:
        heldout = split_of(None, prompt_key(row["prompt_ids"])) == "heldout"
        assert row["dtype"] == ("float32" if heldout else "bfloat16")
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}


# --- accounting


def test_every_prompt_is_accounted_for(llama: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.jsonl"
    bad = [
        Prompt("empty", "art", [{"role": "user", "content": " \n"}]),
        Prompt("long", None, [{"role": "user", "content": "long " * 1000}]),
    ]
    generator = Generator(max_new_tokens=4, batch_size=2)
    report = generator.run(llama, PROMPTS[:1], out)
    report = generator.run(llama, [*PROMPTS, *bad], out)
    assert (report.success, report.failed, report.skipped) == (4, 2, 1)
    assert "4 success + 2 failed + 1 skipped = 7 input" in capsys.readouterr().out
    errors = {row["id"]: row["error"] for row in read_conversations(out) if "error" in row}
    assert errors.keys() == {"empty", "long"}
    assert "empty" in errors["empty"] and "context of the model 1024" in errors["long"]
    before = out.read_bytes()
    report = generator.run(llama, [*PROMPTS, *bad], out)
    assert (report.success, report.failed, report.skipped) == (0, 0, 7)
    assert out.read_bytes() == before


def test_a_template_that_refuses_a_prompt_fails_only_that_one(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llama.load_tokenizer()
    tokenizer.chat_template = (
        "{%- if messages|length > 1 -%}{{ raise_exception('one turn only') }}{%- endif -%}" + tokenizer.chat_template
    )
    monkeypatch.setattr(Target, "load_tokenizer", lambda self: tokenizer)
    two = Prompt("two", None, [*PROMPTS[0].messages, *PROMPTS[1].messages])
    report = Generator(max_new_tokens=2).run(llama, [*PROMPTS, two], tmp_path / "c.jsonl")
    assert (report.success, report.failed) == (5, 1)
    assert read_conversations(tmp_path / "c.jsonl")[0]["error"] == "one turn only"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        Generator().run(llama, PROMPTS, tmp_path / "d.jsonl")


def test_an_answer_ends_with_the_context(llama: Target, tmp_path: Path) -> None:
    endless = dataclasses.replace(llama, end_ids=())
    prompt = Prompt("long", None, [{"role": "user", "content": "x" * 1000}])
    Generator(max_new_tokens=64).run(endless, [prompt, PROMPTS[0]], tmp_path / "c.jsonl")
    rows = {row["id"]: row for row in read_conversations(tmp_path / "c.jsonl")}
    assert len(rows["long"]["prompt_ids"]) + len(rows["long"]["answer_ids"]) == 1024
    assert len(rows["p0"]["answer_ids"]) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.7}, "sampling"),
        ({"dtype": "bfloat16", "heldout_dtype": "bfloat16"}, "dtype float32, now bfloat16"),
        ({"template": {"thinking": False}}, "another prompt or chat template"),
    ],
)
def test_other_settings_are_refused(llama: Target, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    generator = Generator(max_new_tokens=2, dtype="float32")
    generator.run(llama, PROMPTS[:2], tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(generator, **change).run(llama, PROMPTS, tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 0},
        {"workers": 0},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"timeout_s": 0},
        {"timeout_s": math.inf},
        {"template": "abc"},
        {"template": None},
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got '?{value}"):
        Generator(**setting)


def test_an_error_stops_the_other_batches(llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or Ctrl-C ends the run at once, not after all batches; the number of threads is as before."""
    threads, steps = torch.get_num_threads(), []

    def failing_append(path: Path, rows: list[object]) -> None:
        if rows:
            raise KeyboardInterrupt

    def counting_choose(self: Generator, logits_BV: torch.Tensor, draws_B: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        return logits_BV.argmax(-1)

    monkeypatch.setattr(conversations, "_append", failing_append)
    monkeypatch.setattr(Generator, "_choose", counting_choose)
    endless = dataclasses.replace(llama, end_ids=())
    with pytest.raises(KeyboardInterrupt):
        Generator(max_new_tokens=20, batch_size=1).run(endless, load_prompts("package")[:40], tmp_path / "c.jsonl")
    assert len(steps) < 40 * 20 / 4
    assert torch.get_num_threads() == threads


def test_an_unknown_dtype_is_refused(llama: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'fp32', expected auto, float32"):
        Generator(dtype="fp32").run(llama, PROMPTS, tmp_path / "c.jsonl")


# --- interruption


def test_a_file_cut_anywhere_is_completed(llama: Target, tmp_path: Path) -> None:
    """Greedy and sampled: the same rows as without the cut, each once, whatever byte the file ends at."""
    for temperature in (0.0, 1.0):
        generator = Generator(max_new_tokens=2, batch_size=2, temperature=temperature)
        whole, cut = tmp_path / f"{temperature}.jsonl", tmp_path / f"{temperature}-cut.jsonl"
        generator.run(llama, PROMPTS, whole)
        content = whole.read_bytes()
        ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
        for size in sorted(
            {0, 1, len(content) - 1, *ends, *(end + 7 for end in ends[:-1]), *(end - 1 for end in ends)}
        ):
            cut.write_bytes(content[:size])
            report = generator.run(llama, PROMPTS, cut)
            assert report.skipped == sum(end <= size for end in ends)
            assert report.success + report.skipped == len(PROMPTS)
            assert cut.read_bytes() == content


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_reading_a_growing_file_never_fails(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    row = dict.fromkeys(conversations.ANSWER_KEYS)
    content = b"".join(json.dumps(row | {"id": str(i)}).encode() + b"\n" for i in range(3))
    path = tmp_path_factory.getbasetemp() / "growing.jsonl"
    size = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:size])
    assert [row["id"] for row in read_conversations(path)] == [str(i) for i in range(content[:size].count(b"\n"))]


KILLED = """
import sys
from pathlib import Path
from medusa_k25.conversations import Generator
from medusa_k25.prompts import load_prompts
from medusa_k25.target import Target

prompts = load_prompts("package")[:60]
Generator(max_new_tokens=16, batch_size=2).run(Target.open(sys.argv[1]), prompts, Path(sys.argv[2]))
"""


def test_a_killed_run_loses_and_repeats_nothing(tiny_llama: Target, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tiny_llama.path), str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not out.exists() or out.read_bytes().count(b"\n") < 10:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = out.read_bytes()
    assert kept.count(b"\n") < 60
    Generator(max_new_tokens=16, batch_size=2).run(tiny_llama, load_prompts("package")[:60], out)
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(row["id"] for row in read_conversations(out)) == sorted(p.id for p in load_prompts("package")[:60])


def test_two_runs_do_not_write_one_file(llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused whether the file was there or not, and leaves it as it is; the first goes on."""
    out, first, second = tmp_path / "new" / "c.jsonl", Generator(max_new_tokens=2), Generator(max_new_tokens=2)
    append, refusals = conversations._append, list[str]()

    def append_beside_another(path: Path, rows: list[dict[str, Any]]) -> None:
        if rows:
            before = out.read_bytes()
            with pytest.raises(ValueError, match="another process is writing to .*c.jsonl; wait") as refusal:
                second.run(llama, PROMPTS, out)
            refusals.append(str(refusal.value))
            assert out.read_bytes() == before
        append(path, rows)

    monkeypatch.setattr(conversations, "_append", append_beside_another)
    for prompts in (PROMPTS[:2], PROMPTS):
        first.run(llama, prompts, out)
    assert len(refusals) == 2
    assert sorted(row["id"] for row in read_conversations(out)) == sorted(prompt.id for prompt in PROMPTS)
    monkeypatch.undo()
    assert second.run(llama, PROMPTS, out).skipped == len(PROMPTS)


def test_a_file_that_another_run_has_just_made_is_refused(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plan = tmp_path / "c.jsonl", Generator.plan

    def plan_too_late(self: Generator, *args: Any) -> Any:
        planned = plan(self, *args)
        monkeypatch.undo()
        Generator(max_new_tokens=2).run(llama, PROMPTS, out)
        return planned

    monkeypatch.setattr(Generator, "plan", plan_too_late)
    with pytest.raises(ValueError, match="another process is writing to"):
        Generator(max_new_tokens=2).run(llama, PROMPTS, out)
    assert len(read_conversations(out)) == len(PROMPTS)


def test_where_nothing_is_written_there_is_no_file(
    llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c.jsonl"
    Generator().run(llama, [], out)
    assert not out.exists()

    def fail(self: Generator, *args: Any) -> Any:
        assert out.exists()
        raise OSError("gone")

    monkeypatch.setattr(Generator, "_answer", fail)
    with pytest.raises(OSError, match="gone"):
        Generator().run(llama, PROMPTS, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a"\n', "c.jsonl:1 is not valid JSON"),
        ('{"id": "a"}\n', "c.jsonl:1 lacks answer, "),
        ('{"id": "a", "error": "b"}\n', "c.jsonl:1 lacks group, messages"),
        ('{"id": "a", "group": null, "messages": [], "error": "b"}\n' * 2, "c.jsonl:2 repeats the id 'a'"),
        ("[1]\n", "c.jsonl:1 lacks answer, "),
    ],
)
def test_a_damaged_conversations_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_conversations(tmp_path / "c.jsonl")


def test_absent_conversations_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"python -m medusa_k25.generate"):
        read_conversations(tmp_path / "c.jsonl")


def test_a_run_with_nothing_to_do_reports_no_speed() -> None:
    assert str(GenerateReport(0, 0, 3, 0, 0.5)).startswith("0 success + 0 failed + 3 skipped = 3 input; 0 tokens")


# --- loops


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([1, 2, 3, *[7] * 24], True),
        ([1, 2, 3, *[7] * 23], False),  # a short run: dashes, digits, an ellipsis
        ([9, *[1, 2, 3, 4, 5, 6] * 4], True),
        ([9, *[1, 2, 3, 4, 5, 6] * 3, 1, 2, 3, 4, 5], False),
        ([*range(32), *range(24)], True),
        ([*range(32), *range(23)], False),
        ([*range(33), *range(33)], False),  # longer than any pattern that counts
        ([*[7] * 40, 2], False),  # it ended by itself
        (list(range(96)), False),
        ([], False),
    ],
)
def test_ends_in_loop(ids: list[int], loop: bool) -> None:
    assert ends_in_loop(ids) is loop


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 9), min_size=1, max_size=32))
def test_any_pattern_repeated_often_is_a_loop(start: list[int], pattern: list[int]) -> None:
    assert ends_in_loop(start + pattern * max(4, -(-24 // len(pattern))))
