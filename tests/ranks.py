"""What torchrun starts in test_ranks.py: one rank that trains several configurations, one after another.

python -m torch.distributed.run --nproc-per-node 2 tests/ranks.py JOBS.json

JOBS.json: a list of {"overrides": [...], "kill": [rank, step] or null, "signal": [rank, step] or null,
"signal_in_validation": [rank, step] or null}. What a job's optimizer held on rank 0, and how many bytes a step sent
over the loopback, lies in its run folder then, as facts.json.
"""

import itertools
import json
import os
import signal
import statistics
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy

from medusa_k25 import train as training
from medusa_k25.config import compose


class Job(Callback):
    def __init__(self, run_dir, kill, signal, signal_in_validation):
        self.run_dir, self.kill, self.signal, self.in_validation = run_dir, kill, signal, signal_in_validation
        self.sent = []  # by all ranks, at the end of each step

    def on_train_batch_start(self, trainer, module, batch, index):
        here = [trainer.global_rank, trainer.global_step]
        if here == self.kill and index % trainer.accumulate_grad_batches:  # in the middle of a step
            os.kill(os.getpid(), signal.SIGKILL)
        if here == self.signal and index % trainer.accumulate_grad_batches:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_start(self, trainer, module):
        if [trainer.global_rank, trainer.global_step] == self.in_validation:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if not (index + 1) % trainer.accumulate_grad_batches:
            lo = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
            self.sent.append(int(lo.split(":")[1].split()[8]))

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            masters = fp32_masters(trainer)
            facts = {
                "elements": sum(tensor.numel() for tensor in masters),
                "dtypes": sorted({str(tensor.dtype) for tensor in masters}),
                "multiplied_in": str(next(module.heads.parameters()).dtype),
            }
            facts["bytes_a_step"] = statistics.median(b - a for a, b in itertools.pairwise(self.sent))
            Path(self.run_dir, "facts.json").write_text(json.dumps(facts))


def fp32_masters(trainer):
    """What the optimizer of this rank updates."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    optimizer = trainer.strategy.deepspeed_engine.optimizer
    return (
        optimizer.fp32_partitioned_groups_flat
        if trainer.strategy.zero_stage_3
        else optimizer.single_partition_of_fp32_groups
    )


def main():
    torch.set_num_threads(1)
    build = training.build
    for job in json.loads(Path(sys.argv[1]).read_text()):
        cfg = compose(job["overrides"])

        def build_with_job(*args, job=job, cfg=cfg):
            built = build(*args)
            orders = (job.get(name) for name in ("kill", "signal", "signal_in_validation"))
            job_callback = Job(cfg.run_dir, *orders)
            built.trainer.callbacks.append(job_callback)  # type: ignore[attr-defined]
            return built

        training.build = build_with_job
        try:
            training.train(cfg)
        except SystemExit as ended:
            print(f"{cfg.run_dir} ended with status {ended.code}", flush=True)


if __name__ == "__main__":
    main()
