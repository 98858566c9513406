"""What a training step costs beside its parts, and what goes over the wire: python -m bench.training

- one rank on a cache of random states: the whole step (reading, heads, loss, optimizer, logging under Lightning)
  beside the loss alone, and beside a step of the original recipe (full logits of one head after the other)
- one and two ranks under DDP and ZeRO 1 to 3, over gloo on the loopback: bytes a step as the kernel counted them on
  `lo`, beside the formula, in units of the gradient's size G. A broadcast lm_head would show: it is larger than G.

Rounds alternate between the methods; shown are medians and the median of the ratios within a round. Seconds are CPU
seconds of one thread: on a busy machine they say more than the clock on the wall. Letters as in medusa_k25/loss.py.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from bench.cache_reader import write_cache
from medusa_k25.cache import Cache
from medusa_k25.callbacks import Progress
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.windows import Batch
from medusa_k25.heads import DraftVocabulary, ResidualHeads
from medusa_k25.loss import MedusaLoss
from medusa_k25.module import MedusaModule, warmup_cosine
from medusa_k25.strategy import STRATEGIES, build_strategy
from medusa_k25.tracking import MetricsTable

K, D, V = 4, 576, 16_384  # the heads' share of the work is 3.5%, as with Kimi-K2.5 (4.2%)
WINDOW, WINDOWS = 64, 8
WIRE_V, WIRE_STEPS = 4096, 20
# Bytes that all W ranks together send a step, in units of G = 4 bytes a parameter: a sum and its return cost 2 (W-1) G,
# a reduce-scatter or an all-gather (W-1) G each
FORMULA: dict[str, Callable[[int], int]] = {
    "ddp": lambda W: 2 * (W - 1),  # gradients: all-reduce
    "zero1": lambda W: 3 * (W - 1),  # gradients: all-reduce; weights: all-gather
    "zero2": lambda W: 3 * (W - 1),  # the same: DeepSpeed sums whole buckets, of which a rank keeps its part
    "zero3": lambda W: 3 * (W - 1),  # gradients: reduce-scatter; weights: all-gather, forward and backward
}


def build(cache: Cache, vocab_size: int) -> tuple[MedusaModule, MedusaData]:
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(torch.arange(vocab_size), vocab_size)
    everything_V = torch.ones(vocab_size, dtype=torch.bool)
    data = MedusaData(
        cache,
        K,
        everything_V,
        teacher_states=False,
        window=WINDOW,
        batch_size=WINDOWS,
        num_workers=0,
        seed=0,
        stage_dir=None,
        stage_gb=0,
        share=1.0,
    )
    lm_head_VD = torch.randn(vocab_size, D) / D**0.5
    optimizer, schedule = partial(torch.optim.AdamW, lr=1e-3), partial(warmup_cosine, 0.05, 0.05)
    module = MedusaModule(
        ResidualHeads(D, K), vocabulary, lm_head_VD, None, MedusaLoss(), optimizer, schedule, {9: 1.0}, 1.0, 10, 10
    )
    return module, data


class Steps(Callback):
    """Reads `clock` at the end of each step."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(self.clock())

    def a_step(self) -> float:
        """The median of all steps but the first three."""
        return statistics.median(b - a for a, b in zip(self.marks[2:], self.marks[3:], strict=False))


def trainer_of(folder: Path, steps: Steps, max_steps: int, strategy: Any, devices: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=max_steps,
        limit_val_batches=0,
        logger=MetricsTable(folder),
        callbacks=[steps, Progress(1.0, 1.0)],
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def recipe(module: MedusaModule, batch: Batch) -> None:
    """Forward and backward as the original trainer has it: logits of all positions, one head after the other."""
    features_KND, labels_KN = module.features_and_labels(batch)
    total = torch.zeros(())
    for k in range(K):
        logits_NV = (features_KND[k] @ module.lm_head_MD.T).float()
        total = total + 0.8 ** (k + 1) * F.cross_entropy(logits_NV, labels_KN[k])
    total.backward()


def compare_a_step(folder: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    cache = write_cache(folder / "cache", "float32", D, 200e6, V)
    module, data = build(cache, V)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    batch = next(iter(data.train_dataloader()))
    features_KND, labels_KN = module.features_and_labels(batch)
    features_KND = features_KND.detach().requires_grad_()
    optimizer = torch.optim.AdamW(module.parameters())

    def whole() -> float:
        steps = Steps(time.process_time)
        module, data = build(cache, V)
        trainer_of(folder, steps, 6, "auto", 1).fit(module, data)
        return steps.a_step()

    def loss() -> float:
        start = time.process_time()
        module.loss(features_KND, module.lm_head_MD, labels_KN, batch.count_K)[0].backward()
        return time.process_time() - start

    def original() -> float:
        start = time.process_time()
        recipe(module, batch)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    methods = {"the loss alone": loss, "the whole step": whole, "a step of the original recipe": original}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(method())
    print(f"\nK={K} D={D} V={V:,}, {WINDOWS} windows of {WINDOW} positions, fp32, {rounds} rounds")
    print(f"{'':32} {'seconds':>8} {'positions/s':>12} {'the loss alone is':>18}")
    for name, seconds in times.items():
        share = statistics.median(a / b for a, b in zip(times["the loss alone"], seconds, strict=True))
        median = statistics.median(seconds)
        print(f"{name:32} {median:8.3f} {WINDOW * WINDOWS / median:12,.0f} {share:18.0%}", flush=True)


def bytes_on_loopback() -> float:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return float(line.split(":")[1].split()[8])  # sent


def rank(folder: Path, devices: int) -> None:
    """What every rank runs: all strategies in turn; rank 0 prints {strategy: [bytes, seconds]} a step."""
    torch.set_num_threads(1)
    cache = Cache.open(folder / "cache")
    figures = {}
    for name in [name for name in STRATEGIES if name != "auto"]:
        module, data = build(cache, WIRE_V)
        sent, seconds = Steps(bytes_on_loopback), Steps(time.perf_counter)
        strategy = build_strategy(name, devices, 1, WINDOWS)
        trainer = trainer_of(folder / "logs", sent, WIRE_STEPS, strategy, devices)
        trainer.callbacks.append(seconds)  # type: ignore[attr-defined]
        trainer.fit(module, data)
        figures[name] = [sent.a_step(), seconds.a_step()]
    if int(os.environ["RANK"]) == 0:
        print("figures " + json.dumps(figures), flush=True)


def compare_ranks(folder: Path) -> None:
    module, _ = build(write_cache(folder / "cache", "float32", D, 200e6, WIRE_V), WIRE_V)
    gradient = 4 * sum(parameter.numel() for parameter in module.parameters())
    print(f"\nG = {gradient / 1e6:.2f} MB of gradients; lm_head {module.lm_head_MD.nbytes / 1e6:.2f} MB")
    print(f"{'':8} {'ranks':>6} {'MB a step':>10} {'in G':>6} {'formula':>8} {'ms a step':>10}")
    for devices in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        child = ["-m", "bench.training", "--rank", str(folder), "--devices", str(devices)]
        run = subprocess.run([*command, *child], capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(run.stdout + run.stderr)
        line = next(line for line in run.stdout.splitlines() if line.startswith("figures "))
        for name, (sent, seconds) in json.loads(line.removeprefix("figures ")).items():
            expected = FORMULA[name](devices)
            print(
                f"{name:8} {devices:6} {sent / 1e6:10.2f} {sent / gradient:6.2f} {expected:8} {seconds * 1e3:10.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description="A training step and its parts.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of Lightning, about settings that a benchmark has no use for
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.rank:
        rank(arguments.rank, arguments.devices)
        return
    with tempfile.TemporaryDirectory() as scratch:
        compare_a_step(Path(scratch) / "step", arguments.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        compare_ranks(Path(scratch))


if __name__ == "__main__":
    main()
