"""The target's answers from vLLM's OpenAI-compatible server: token for token those that this process gives."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import vllm

from medusa_k25.conversations import Generator, read_conversations
from medusa_k25.prompts import Prompt, load_prompts
from medusa_k25.target import Target
from medusa_k25.target_builders import smollm2

PROMPTS = [replace(prompt, label="shipped") for prompt in load_prompts("package")[:10]]


@contextmanager
def serving(target: Target, log: Path) -> Iterator[str]:
    """The address of a server in processes of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.path)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--port", str(port)]
    environment = {
        "PYTHONPATH": "",
        "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_answers_as_this_process_does(tmp_path: Path) -> None:
    """A full stop ends an answer, too, so that many end early."""
    target = smollm2()
    (full_stop,) = target.load_tokenizer().encode(".")
    target = replace(target, end_ids=(*target.end_ids, full_stop))
    generator = Generator(max_new_tokens=24, dtype="float32", concurrency=5)
    generator.run(target, PROMPTS, tmp_path / "here.jsonl")
    long = Prompt("long", None, [{"role": "user", "content": "long " * 600}])
    with serving(target, tmp_path / "log") as url:
        report = generator.run(target, PROMPTS[:6], tmp_path / "there.jsonl", url)
        assert (report.success, report.failed, report.skipped) == (6, 0, 0)
        report = generator.run(target, [*PROMPTS, long], tmp_path / "there.jsonl", url)
        assert (report.success, report.failed, report.skipped) == (4, 1, 6)
        for name in ("sampled", "again"):
            replace(generator, temperature=1.0).run(target, PROMPTS, tmp_path / f"{name}.jsonl", url)
        other = replace(target, vocab_size=100)
        with pytest.raises(ValueError, match="answered with token id"):
            generator.run(other, PROMPTS, tmp_path / "other.jsonl", url)
    here, there, sampled, again = (
        {row["id"]: row for row in read_conversations(tmp_path / f"{name}.jsonl")}
        for name in ("here", "there", "sampled", "again")
    )
    assert "the context of the model 512" in there["long"]["error"]
    assert {row["finish_reason"] for row in here.values()} == {"stop", "length"}
    for id, row in here.items():
        origin = row["origin"] | {"engine": f"vllm {vllm.__version__}"}
        assert there[id] == row | {"origin": origin, "dtype": "unknown"}
    for row in sampled.values():
        stopped = row["answer_ids"][-1] in target.end_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert not set(row["answer_ids"][:-1]) & set(target.end_ids)
        assert len(row["answer_ids"]) == 24 or stopped
    assert {id: row["answer_ids"] for id, row in sampled.items()} == {
        id: row["answer_ids"] for id, row in again.items()
    }
