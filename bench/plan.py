"""A plan against what it plans, on this machine: python -m bench.plan

The demo's heads are trained for some steps on the demo's cache, in a process of its own, and what that took stands
beside what `plan calibrate=true` says: seconds, memory and the cache's bytes. Seconds are CPU seconds of one thread: on
a busy machine they say more than the clock on the wall. A step is timed right before and right after the training, and
the plan takes the mean; where the two differ, no comparison is better than that.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from hydra.utils import instantiate

from bench.live_bytes import LiveBytes, tensors_of
from medusa_k25 import plan, train
from medusa_k25.cache import Cache
from medusa_k25.config import compose
from medusa_k25.costs.planning import cache_bytes, estimate, planned_run

RUN = Path("runs/smol_4heads")
STEPS, VALIDATIONS, WATCHED_STEPS = 40, 2, 3


def overrides(run: Path, scratch: str) -> list[str]:
    return [
        f"cache={run / 'cache'}",
        f"conversations={run / 'conversations.jsonl'}",
        f"run_dir={scratch}",
        f"trainer.max_steps={STEPS}",
        f"trainer.val_check_interval={STEPS // VALIDATIONS}",
    ]


def measure(arguments: list[str]) -> None:
    """What the child does: trains, and prints seconds and the most bytes of tensors at a time."""
    torch.set_num_threads(1)
    config = compose(arguments)
    target = instantiate(config.target)
    training = train.build(config, target, Cache.open(Path(config.cache), target))
    start = time.process_time()
    training.trainer.fit(training.module, datamodule=training.data)
    seconds = time.process_time() - start
    training = train.build(config, target, Cache.open(Path(config.cache), target))  # watched, it would be slower
    training.trainer.fit_loop.epoch_loop.max_steps = WATCHED_STEPS
    with LiveBytes(tensors_of(training.module)) as live:
        training.trainer.fit(training.module, datamodule=training.data)
    print("\nfigures " + json.dumps({"seconds": seconds, "bytes": live.peak}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description="A plan against what it plans.")
    parser.add_argument("--run", type=Path, default=RUN, help="a run with conversations.jsonl and cache")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.measure:
        measure(parsed.measure)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = overrides(parsed.run, scratch)
        config = compose(arguments)
        served, hardware = plan.served_of(config.target), instantiate(config.hardware)
        data = instantiate(config.plan).dataset(plan.counted(config))
        cost = plan.cost_on(hardware, config, served, data)
        run = planned_run(data, STEPS, cost.N, STEPS // VALIDATIONS, None, config.evaluate.most_tokens)
        speeds = [plan.calibrated(config, cost, hardware, time.process_time)]
        child = [sys.executable, "-m", "bench.plan", "--measure", *arguments]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        speeds.append(plan.calibrated(config, cost, hardware, time.process_time))
    measured = json.loads(done.stdout.rpartition("figures ")[2])
    planned = estimate(hardware, cost, data, run, config.capture.storage_dtype, mean(speeds))
    files = sum(file.stat().st_size for file in Path(config.cache).rglob("*") if file.is_file())
    size = cache_bytes(data, cost.D, config.capture.storage, config.capture.storage_dtype)
    print(f"{STEPS} steps and {VALIDATIONS} validations of the embedded default, {parsed.run}")
    print(f"a step was timed at {speeds[0]:,.0f} positions/s before, {speeds[1]:,.0f} after the training\n")
    print(f"{'':24} {'planned':>10} {'measured':>10} {'planned / measured':>20}")
    for what, expected, found in (
        ("training, s", planned.hours("train") * 3600, measured["seconds"]),
        ("memory, MB", cost.memory_bytes / 1e6, measured["bytes"] / 1e6),
        ("cache, MB", size / 1e6, files / 1e6),
    ):
        print(f"{what:24} {expected:10.2f} {found:10.2f} {expected / found:20.2f}")


if __name__ == "__main__":
    main()
