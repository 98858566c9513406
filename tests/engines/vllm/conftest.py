"""Medusa-1 heads on the demo's cache, which vLLM can hold, and a vLLM engine to serve them; run in its own environment.

Needs runs/smol_4heads and runs/smol_residual, which `make engines-ready` makes, and the converted SmolLM2 in
MEDUSA_K25_HOME.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from medusa_k25.cache import Cache, Document
from medusa_k25.checkpoint import HeadsCheckpoint, find_checkpoint, load_heads
from medusa_k25.data.windows import documents_of
from medusa_k25.target import Target
from medusa_k25.target_builders import smollm2

ROOT = Path(__file__).parents[3]
RUN, RESIDUAL = ROOT / "runs" / "smol_4heads", ROOT / "runs" / "smol_residual"


@dataclass(frozen=True)
class Demo:
    """The demo's target, cache and held-out answers, and residual heads."""

    target: Target
    cache: Cache
    checkpoint: HeadsCheckpoint
    heldout: list[Document]


@pytest.fixture(scope="session")
def demo() -> Demo:
    for run in (RUN, RESIDUAL):
        assert run.is_dir(), f"{run} is missing: run `make engines-ready` first"
    target = smollm2()
    cache = Cache.open(RUN / "cache", target)
    heldout = [d for d in documents_of(cache, "heldout") if (d.sampling["mode"], d.dtype) == ("greedy", "float32")]
    assert len(heldout) >= 20
    return Demo(target, cache, load_heads(find_checkpoint(RESIDUAL / "checkpoints", "best")), heldout)


@dataclass(frozen=True)
class Answered:
    """One batch: the answers, and vLLM's counters over it."""

    answers: list[list[int]]
    drafts: int
    accepted: list[int]  # by position


Serve = Callable[[Target, Path, Sequence[tuple[list[list[int]], int]], dict[str, Any]], list[Answered]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """(target, heads' folder, [(prompts, max_tokens), ...], more engine options) -> a result a batch."""

    def answer(
        target: Target, heads: Path, batches: Sequence[tuple[list[list[int]], int]], options: dict[str, Any]
    ) -> list[Answered]:
        folder = tmp_path_factory.mktemp("engine")
        num_heads = json.loads((heads / "config.json").read_text())["num_heads"]
        speculative = {"method": "medusa", "model": str(heads), "num_speculative_tokens": num_heads}
        job = {
            "model": str(target.path),
            "options": {"speculative_config": speculative} | options,
            "batches": [{"prompts": prompts, "max_tokens": limit} for prompts, limit in batches],
            "end_ids": list(target.end_ids),
            "answers": str(folder / "answers.json"),
        }
        (folder / "job.json").write_text(json.dumps(job))
        log = folder / "log"
        with log.open("w") as output:
            result = subprocess.run(
                [sys.executable, Path(__file__).with_name("answer.py"), folder / "job.json"],
                env=os.environ | {"PYTHONPATH": "", "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so")},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=300,
            )
        assert result.returncode == 0, log.read_text()[-5000:]
        found = json.loads((folder / "answers.json").read_text())
        return [Answered(one["answers"], one["drafts"][0], one["accepted"]) for one in found]

    return answer
