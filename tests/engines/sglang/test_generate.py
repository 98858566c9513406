"""The target's answers from a real server: token for token those that this process gives."""

import json
import shutil
from dataclasses import replace

import pytest
import sglang

from medusa_k25.conversations import Generator, read_conversations
from medusa_k25.prompts import Prompt, load_prompts
from tests.engines.sglang.engine import serving

SHIPPED = load_prompts("package")[:12]


@pytest.fixture(scope="module")
def target(tiny_llama):
    """Many tokens end an answer: the server's own, too, which it always heeds."""
    own = {*tiny_llama.end_ids, tiny_llama.load_tokenizer().eos_token_id}
    return replace(tiny_llama, end_ids=(*range(5, 490, 12), *own))


def answers(path):
    return {row["id"]: row for row in read_conversations(path)}


def test_a_server_answers_as_this_process_does(target, tmp_path):
    prompts = [replace(prompt, label="shipped") for prompt in SHIPPED]
    prompts.append(Prompt("tools", None, [{"role": "user", "content": "2+2?"}], tools=[{"name": "sum"}]))
    generator = Generator(max_new_tokens=24, dtype="float32", template={"thinking": False}, concurrency=5)
    generator.run(target, prompts, tmp_path / "here.jsonl")
    with serving(target, tmp_path / "log") as (url, _):
        report = generator.run(target, prompts[:6], tmp_path / "there.jsonl", url)
        assert (report.success, report.failed, report.skipped) == (6, 0, 0)
        report = generator.run(target, prompts, tmp_path / "there.jsonl", url)
        assert (report.success, report.failed, report.skipped) == (7, 0, 6)
        sampled = replace(generator, temperature=1.0)
        sampled.run(target, prompts, tmp_path / "sampled.jsonl", url)
        with pytest.raises(ValueError, match="tokenises text otherwise|answered with token id"):
            generator.run(other_tokenizer(target, tmp_path / "other"), prompts, tmp_path / "other.jsonl", url)
    here, there = answers(tmp_path / "here.jsonl"), answers(tmp_path / "there.jsonl")
    assert {row["finish_reason"] for row in here.values()} == {"stop", "length"}
    for id, row in here.items():
        origin = row["origin"] | {"engine": f"sglang {sglang.__version__}"}
        assert there[id] == row | {"origin": origin}
    lengths = set()
    for row in read_conversations(tmp_path / "sampled.jsonl"):
        stopped = row["answer_ids"][-1] in target.end_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert not set(row["answer_ids"][:-1]) & set(target.end_ids)
        assert len(row["answer_ids"]) == 24 or stopped
        lengths.add(len(row["answer_ids"]))
    assert len(lengths) > 2


def test_a_real_model_answers_as_in_this_process(smollm2, tmp_path):
    """Its own tokenizer and chat template; the texts end by themselves."""
    prompts = [Prompt(text, None, [{"role": "user", "content": f"Say {text}."}]) for text in ("yes", "hi", "one word")]
    generator = Generator(max_new_tokens=48, dtype="float32")
    generator.run(smollm2, prompts, tmp_path / "here.jsonl")
    with serving(smollm2, tmp_path / "log") as (url, _):
        report = generator.run(smollm2, prompts, tmp_path / "there.jsonl", url)
    assert report.success == 3
    here, there = answers(tmp_path / "here.jsonl"), answers(tmp_path / "there.jsonl")
    assert {id: row["answer_ids"] for id, row in here.items()} == {id: row["answer_ids"] for id, row in there.items()}
    assert "stop" in {row["finish_reason"] for row in here.values()}


def other_tokenizer(target, folder):
    """The same model with its vocabulary in another order."""
    shutil.copytree(target.path, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    return replace(target, path=folder)
