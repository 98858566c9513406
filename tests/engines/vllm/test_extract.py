"""Files of hidden states that vLLM itself wrote are imported, and hold what transformers computes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from medusa_k25.cache import Cache
from medusa_k25.cache.capture import Capture
from medusa_k25.cache.imports import Import
from medusa_k25.target import Target
from medusa_k25.target_builders import smollm2

QUESTIONS = ["Name three colours.", "What is a fox?", "Why is the sky blue?", "Write a sentence about the sea."]
MAX_TOKENS = 24


@dataclass(frozen=True)
class Extracted:
    """What vLLM left behind for a list of layers."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


def extract(folder: Path, target: Target, layers: list[int]) -> Extracted:
    tokenizer = target.load_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    job = {
        "model": str(target.path),
        "layers": layers,
        "folder": str(folder / "states"),
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "end_ids": list(target.end_ids),
        "answers": str(folder / "answers.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    log = folder / "log"
    with log.open("w") as output:
        result = subprocess.run(
            [sys.executable, Path(__file__).with_name("extract.py"), folder / "job.json"],
            env=os.environ | {"PYTHONPATH": "", "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so")},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    assert result.returncode == 0, log.read_text()[-5000:]
    return Extracted(folder / "states", prompts, json.loads((folder / "answers.json").read_text()))


@pytest.fixture(scope="module")
def target() -> Target:
    return smollm2()


@pytest.fixture(scope="module")
def extracted(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Extracted:
    return extract(tmp_path_factory.mktemp("vllm"), target, [2, target.num_layers // 2, target.num_layers])


def rows_of(extracted: Extracted, target: Target) -> str:
    """The conversations, as generate would have stored them."""
    rows = [
        {
            "id": f"q{i}",
            "group": None,
            "messages": [{"role": "user", "content": QUESTIONS[i]}],
            "prompt_ids": prompt_ids,
            "answer_ids": answer_ids,
            "answer": "",
            "finish_reason": "stop" if answer_ids[-1] in target.end_ids else "length",
            "sampling": {"mode": "greedy", "temperature": 0.0, "top_p": 1.0},
            "dtype": "float32",
            "label": None,
        }
        for i, (prompt_ids, answer_ids) in enumerate(zip(extracted.prompts, extracted.answers, strict=True))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("known", [True, False], ids=["conversations", "files alone"])
def test_vllms_own_files(extracted: Extracted, target: Target, tmp_path: Path, known: bool) -> None:
    conversations = tmp_path / "conversations.jsonl" if known else None
    if conversations is not None:
        conversations.write_text(rows_of(extracted, target))
    report = Import("vllm", extracted.folder, Capture(), conversations).run(target, tmp_path / "cache")
    assert (report.stored, report.faults, report.unfinished) == (len(QUESTIONS), {}, 0)
    assert report.check is not None and report.check.agreement > 0.99
    cache = Cache.open(tmp_path / "cache", target)
    texts = {tuple(prompt): answer for prompt, answer in zip(extracted.prompts, extracted.answers, strict=True)}
    model = target.load_model(torch.float32)
    for document in cache.documents:
        P, ids_T = document.prompt_length, cache.token_ids(document)
        answer_ids = texts.pop(tuple(ids_T[:P].tolist()))
        # vLLM does not write the last token, whose state nobody has computed
        assert ids_T[P:].tolist() == (answer_ids if known else answer_ids[:-1])
        hidden_MD, positions_M = cache.states(document)
        assert positions_M.tolist() == list(range(P - 1, len(ids_T) - 1))
        wanted_MD = model.hidden(ids_T[None].long())[0, positions_M]
        torch.testing.assert_close(hidden_MD, wanted_MD, atol=2e-3, rtol=2e-3)
    assert not texts


def test_another_last_layer_is_refused(target: Target, tmp_path: Path) -> None:
    extracted = extract(tmp_path, target, [2, target.num_layers - 1])
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text(rows_of(extracted, target))
    with pytest.raises(ValueError, match="nothing was imported from .*(unknown layer|no known convention)"):
        Import("vllm", extracted.folder, Capture(), conversations).run(target, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
