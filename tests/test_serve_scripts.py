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


def gpu(cwd: Path, capability: str) -> None:
    """An nvidia-smi that knows this much of two GPUs."""
    (cwd / "bin").mkdir()
    stub = cwd / "bin" / "nvidia-smi"
    stub.write_text(f"#!/usr/bin/env bash\nprintf '{capability}\\n{capability}\\n'\n")
    stub.chmod(0o755)


def test_the_sglang_recipe_prints_its_command(tmp_path: Path) -> None:
    status, out = run("serve_sglang.sh", tmp_path, "--port", "9000", DRY_RUN="1", HEADS="my heads")
    assert status == 0
    python, dash_m, module, *flags = shlex.split(out)
    assert (python, dash_m, module, flags[-2:]) == (sys.executable, "-m", "sglang.launch_server", ["--port", "9000"])
    value = dict(pairwise(flags))
    assert value["--model-path"] == "moonshotai/Kimi-K2.5"
    assert value["--tp-size"] == "2"
    assert (value["--speculative-algorithm"], value["--speculative-draft-model-path"]) == ("MEDUSA", "my heads")
    assert "--trust-remote-code" not in flags  # that takes the user's word
    assert "--disable-radix-cache" not in flags


def test_without_heads_the_sglang_recipe_serves_the_same_server(tmp_path: Path) -> None:
    _, out = run("serve_sglang.sh", tmp_path, DRY_RUN="1", HEADS="heads")
    _, baseline = run("serve_sglang.sh", tmp_path, DRY_RUN="1")
    assert out.replace(" --speculative-algorithm MEDUSA --speculative-draft-model-path heads", "") == baseline


@pytest.mark.parametrize(
    ("capability", "choice", "backend", "pages"),
    [
        ("9.0", "", "fa3", "1"),
        ("12.0", "", "triton", "1"),
        ("10.0", "", "triton", "1"),
        ("10.0", "trtllm_mla", "trtllm_mla", None),  # it has pages of its own
    ],
)
def test_the_sglang_recipe_chooses_a_backend_that_verifies_trees(
    tmp_path: Path, capability: str, choice: str, backend: str, pages: str | None
) -> None:
    gpu(tmp_path, capability)
    status, out = run("serve_sglang.sh", tmp_path, DRY_RUN="1", ATTENTION=choice)
    value = dict(pairwise(shlex.split(out)))
    assert (status, value["--attention-backend"], value.get("--page-size")) == (0, backend, pages)


def test_the_sglang_recipe_records(tmp_path: Path) -> None:
    settings = {"MEDUSA_K25_RECORD": "/my states", "MEDUSA_K25_RECORD_ALL": "1", "TRUST_REMOTE_CODE": "1"}
    _, out = run("serve_sglang.sh", tmp_path, DRY_RUN="1", **settings)
    env, *command = shlex.split(out)
    assert (env, set(command[:2])) == ("env", {"MEDUSA_K25_RECORD=/my states", "MEDUSA_K25_RECORD_ALL=1"})
    assert {"--disable-radix-cache", "--trust-remote-code"} < set(command)


def test_the_sglang_recipe_becomes_the_command_that_it_prints(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf \'%q \' "$0" "$@"\nexit 7\n')
    stub.chmod(0o755)
    status, out = run("serve_sglang.sh", tmp_path, HEADS="my heads", PYTHON=str(stub))
    printed, got = (shlex.split(line) for line in out.splitlines())
    assert (status, got) == (7, printed)


def test_the_field_check_passes_its_variables_on(tmp_path: Path) -> None:
    python = [sys.executable, str(LAUNCH / "field_check.py")]
    status, out = run("field_check.sh", tmp_path, DRY_RUN="1")
    assert (status, shlex.split(out)) == (0, [*python, "--out", "field_check.json", "--time-s", "480"])
    own = {"OUT": "my file", "MODEL": "mine", "QUICK": "1", "TIME_S": "60"}
    _, out = run("field_check.sh", tmp_path, DRY_RUN="1", **own)
    assert shlex.split(out) == [*python, "--out", "my file", "--time-s", "60", "--model", "mine", "--quick"]
