"""The recipes in launch/ that serve: their commands, and what they refuse before a server starts to load."""

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.serving.formats import export_heads
from medusa_k25.tree import Tree

LAUNCH = Path(__file__).parents[1] / "launch"
D, V = 8, 32


def run(recipe: str, cwd: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """(status, output) of a recipe with nothing in its environment but PATH, PYTHON, two GPUs, and `env`."""
    usual = {"PATH": f"{cwd / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "GPUS_PER_NODE": "2"}
    command: list[str | Path] = ["bash", LAUNCH / recipe, *arguments]
    result = subprocess.run(
        command, cwd=cwd, env=usual | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    return result.returncode, result.stdout


def write_heads(folder: Path, draft_size: int = V, format: str = "vllm") -> Path:
    vocabulary = DraftVocabulary(torch.arange(draft_size), V)
    heads = ResidualHeads(D, 3, draft_vocab_size=draft_size)
    export_heads(folder, heads, vocabulary, Tree.chain(3), torch.bfloat16, {}, format, torch.zeros(V, D))
    return folder


def test_the_vllm_recipe_prints_its_command(tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "my heads")
    status, out = run("serve_vllm.sh", tmp_path, "--port", "9000", DRY_RUN="1", HEADS=str(heads))
    assert status == 0
    vllm, serve, model, *flags = shlex.split(out)
    assert (vllm, serve, model, flags[-2:]) == ("vllm", "serve", "moonshotai/Kimi-K2.5", ["--port", "9000"])
    value = dict(pairwise(flags))
    assert value["--tensor-parallel-size"] == "2"
    assert json.loads(value["--speculative-config"]) == {
        "method": "medusa",
        "model": str(heads),
        "num_speculative_tokens": 3,
    }
    assert json.loads(value["--hf-overrides"]) == {"vocab_size": V}
    assert "--trust-remote-code" not in flags  # that takes the user's word
    assert "--model-loader-extra-config" not in flags


def test_the_vllm_recipes_choices(tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads", draft_size=20)
    choices = {"MODEL": "mine", "DRAFTS": "2", "TRUST_REMOTE_CODE": "1"}
    status, out = run("serve_vllm.sh", tmp_path, DRY_RUN="1", HEADS=str(heads), **choices)
    assert status == 0
    _, _, model, *flags = shlex.split(out)
    value = dict(pairwise(flags))
    assert model == "mine"
    assert json.loads(value["--speculative-config"])["num_speculative_tokens"] == 2
    assert json.loads(value["--model-loader-extra-config"]) == {"enable_weights_track": False}
    assert "--trust-remote-code" in flags


def test_the_vllm_recipe_becomes_the_command_that_it_prints(tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "heads")
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "vllm"
    stub.write_text("#!/usr/bin/env bash\nprintf '%q ' vllm \"$@\"\nexit 7\n")
    stub.chmod(0o755)
    status, out = run("serve_vllm.sh", tmp_path, HEADS=str(heads))
    printed, got = (shlex.split(line) for line in out.splitlines())
    assert (status, got) == (7, printed)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "HEADS=FOLDER is needed"),
        ({"HEADS": "nowhere"}, "HEADS=nowhere is no export; python -m medusa_k25.export format=vllm makes one"),
        ({"HEADS": "medusa"}, "HEADS=medusa is no export"),
        ({"HEADS": "sglang"}, "HEADS=sglang has no copy of lm_head, which vLLM needs; export it with format=vllm"),
        ({"HEADS": "vllm", "DRAFTS": "4"}, "DRAFTS=4: expected 1 to 3"),
        ({"HEADS": "vllm", "DRAFTS": "all"}, "DRAFTS=all: expected 1 to 3"),
    ],
)
def test_the_vllm_recipe_refuses_what_vllm_would_not_or_would_late(
    tmp_path: Path, env: dict[str, str], message: str
) -> None:
    for format in ("vllm", "sglang", "medusa"):
        write_heads(tmp_path / format, format=format)
    status, out = run("serve_vllm.sh", tmp_path, **env)
    assert (status, out.count("\n")) == (2, 1)
    assert message in out
