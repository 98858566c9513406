"""`evaluate server=` on real servers: what it counts is the reference decoder's, and the switch is left as it was."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_k25.answer_client import Ask
from medusa_k25.conversations import Generator
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.prompts import load_prompts
from medusa_k25.serving.comparing import compare
from medusa_k25.serving.control import Order, give_order, last_order
from medusa_k25.serving.live import NODES, SHORT, Sampling, Switch, Trial, open_servers, sides_of
from medusa_k25.serving.sglang import meter
from medusa_k25.target import Target
from medusa_k25.tree import Tree
from tests.engines.sglang.accepting import TREE, accepting_heads, decode_all, serve_from
from tests.engines.sglang.engine import serving

LIMIT = 40
TOPICS = ("colours", "rivers")


def test_a_server_is_measured_with_heads_and_without(tiny_llama: Target, tmp_path: Path) -> None:
    assert NODES == meter.NODES and SHORT < LIMIT
    target, tokenizer = tiny_llama, tiny_llama.load_tokenizer()
    tools = [{"name": "add", "parameters": {"type": "object"}}]
    rows: list[dict[str, Any]] = [
        {"id": f"q{i}", "topic": TOPICS[i % 2], "prompt": f"Name {i + 2} {TOPICS[i % 2]}."} for i in range(16)
    ]
    for row in rows[:8]:
        row["tools"] = tools
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs, _ = Generator(LIMIT).prepare(tokenizer, load_prompts(str(file)), 1000, "float32", "float32")
    prompts = [job.prompt_ids for job in jobs]
    model = target.load_model(torch.float32)
    vocabulary = DraftVocabulary(torch.arange(target.vocab_size), target.vocab_size)
    nothing = ResidualHeads(target.hidden_size, 1)
    answers = [each.answer_ids for each in decode_all(target, model, nothing, vocabulary, Tree([]), prompts, LIMIT)]
    whole = [i for i, answer in enumerate(answers) if not {*target.end_ids} & {*answer}][:6]
    jobs, asked = [jobs[i] for i in whole], [rows[i] for i in whole]
    answers, prompts = [answers[i] for i in whole], [prompts[i] for i in whole]
    assert len(asked) == 6 and {row["topic"] for row in asked} == {*TOPICS} and any("tools" in row for row in asked)
    heads = accepting_heads(model, target.lm_head, prompts, answers, vocabulary, steps=40)
    folder = tmp_path / "heads"
    folder.mkdir()
    serve_from(folder, target, heads, vocabulary, TREE)
    decoded = decode_all(target, model, heads, vocabulary, TREE, prompts, LIMIT)
    passes = {row["id"]: each.acceptance.passes for row, each in zip(asked, decoded, strict=True)}
    control = tmp_path / "control"
    control.mkdir()
    before = Order("on", str(folder))
    give_order(control, before)

    trial, sampling = Trial([1, 3], 2, "topic"), Sampling(0.0, 1.0, 0)

    def measured(url: str, baseline: str | None) -> dict[str, Any]:
        servers = open_servers(url, baseline, target, tokenizer, 300)
        servers[0].engine.require_target(prompts[0])
        levels, notes = trial.levels(servers)
        switch = None
        if baseline is None:
            switch = Switch(control, servers[0].engine, Ask(prompts[0], SHORT, 0.0, 1.0, 0))
        with nullcontext() if switch is None else switch.restored():
            rounds, more = trial.run(jobs, sides_of(servers, switch), levels, sampling)
        assert levels == [1, 3] and notes + more == []
        return compare(servers, tokenizer, jobs, [trial.label_of(job) for job in jobs], rounds, greedy=True)

    medusa = {"speculative_algorithm": "MEDUSA", "speculative_draft_model_path": str(folder)}
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(target, tmp_path / "plain", max_total_tokens=5000) as (plain, _),
    ):
        patch.setenv("MEDUSA_K25_CONTROL", str(control))
        with serving(target, tmp_path / "log", tool_call_parser="qwen25", **medusa) as (url, _):
            sections = [measured(url, plain), measured(url, None)]
            with pytest.raises(ValueError, match="serves no heads"):
                open_servers(plain, None, target, tokenizer, 300)
    assert last_order(control) == before
    for section in sections:
        print(section["levels"], section["acceptance"], section["cycles"])
        assert [level["concurrency"] for level in section["levels"]] == [1, 3]
        # each prompt once at 1 at a time, and each twice in two rounds of six at 3 at a time
        assert section["equality"]["equal"] == section["equality"]["answers"] == 18
        parts = {part["name"]: part for part in section["acceptance"]}
        for topic in TOPICS:
            of_topic = [passes[row["id"]] for row in asked if row["topic"] == topic]
            assert parts[topic]["passes"] == 3 * sum(of_topic)
            assert parts[topic]["emitted"] == 3 * (LIMIT - 1) * len(of_topic)
        with_tools = 3 * sum("tools" in row for row in asked)
        every = parts["all"]["passes"]
        assert section["cycles"] == {"known": every, "plain": 0, "nodes": TREE.num_nodes * every}
        assert section["tools"]["with heads"]["answers"] == section["tools"]["without"]["answers"] == with_tools
    assert sections[0]["kv_tokens"] == {"with heads": 4096, "without": 5000} and sections[1]["kv_tokens"] is None
