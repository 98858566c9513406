"""Ranks as torchrun starts them, without its start: forked from a process that has imported everything.

A job is {"overrides": [...], "kill": [rank, step] or null, "signal": [rank, step] or null, "signal_in_validation":
[rank, step] or null}; a rank trains several, one after another. What a job's optimizer held on rank 0, and how many
bytes a step sent from rank to rank, lies in its run folder then, as facts.json. The recipes' tests start torchrun
itself.
"""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import deepspeed  # noqa: F401 - for the ranks that need it
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy

from medusa_k25 import train as training
from medusa_k25.config import compose

SECONDS = 300


def on_ranks(ranks: int, folder: Path, *jobs: dict, succeed: bool = True) -> str:
    """The output of `ranks` processes that run `jobs`. As under torchrun, the end of one is the end of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    out = folder / "out"
    out.write_bytes(b"")
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": folder.name}
        environment = {**os.environ, **{name: str(value) for name, value in (world | place).items()}}
        processes.append(context.Process(target=rank_main, args=(environment, out, jobs)))
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        wait([process.sentinel for process in processes if process.is_alive()], timeout=SECONDS)
        if any(process.exitcode for process in processes):
            break
    for stop in (multiprocessing.process.BaseProcess.terminate, multiprocessing.process.BaseProcess.kill):
        for process in processes:
            stop(process)
        for process in processes:
            process.join(30)
    assert all(process.exitcode == 0 for process in processes) == succeed, out.read_text()
    return out.read_text()


def rank_main(environment: dict[str, str], out: Path, jobs: tuple[dict, ...]) -> None:
    with out.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # loaders' workers, as in a process of its own
    run_jobs(jobs)


class Job(Callback):
    def __init__(self, run_dir, kill, signal, signal_in_validation):
        self.run_dir, self.kill, self.signal, self.in_validation = run_dir, kill, signal, signal_in_validation
        self.sent = []  # by this rank, at the end of each step

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
            self.sent.append(bytes_sent())

    def on_train_end(self, trainer, module):
        of_ranks = [self.sent] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(of_ranks, self.sent)
        if trainer.is_global_zero:
            masters = fp32_masters(trainer)
            facts = {
                "elements": sum(tensor.numel() for tensor in masters),
                "dtypes": sorted({str(tensor.dtype) for tensor in masters}),
                "multiplied_in": str(next(module.heads.parameters()).dtype),
            }
            # validations and checkpoints between two steps only add to it
            facts["bytes_a_step"] = min(b - a for a, b in itertools.pairwise(map(sum, zip(*of_ranks, strict=True))))
            Path(self.run_dir, "facts.json").write_text(json.dumps(facts))


def bytes_sent() -> int:
    """Over the TCP connections that this process has open; the loopback's own counter would see other tests, too."""
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own is closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                        total += int.from_bytes(info[200:208], sys.byteorder)  # tcpi_bytes_sent
    return total


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


def run_jobs(jobs):
    torch.set_num_threads(1)
    build = training.build
    for job in jobs:
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
