"""What happens around training: checkpoints, speed, the table of metrics."""

import csv
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from medusa_k25.checkpoint import drop_superseded, write_heads
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.windows import Batch
from medusa_k25.module import MedusaModule

say = rank_zero_only(print)


class Stopped(Exception):
    """Training was told to stop, and has saved a checkpoint. `signal`: by which signal."""

    def __init__(self, signal_number: int):
        self.signal = signal.Signals(signal_number)


class Checkpoints(Callback):
    """A checkpoint after every validation; the best and the last are kept.

    A signal (Ctrl-C, SIGTERM, or SIGUSR1, which SLURM sends before the time is up) to any rank ends the training after
    the running step, with a checkpoint; a second one stops at once, without. A checkpoint is written beside its place
    and renamed when it is whole. `record` is the provenance that goes into heads.json with step, metrics and tree.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, folder: Path, data: MedusaData, record: Mapping[str, Any]):
        self.folder, self.data, self.record = folder, data, record
        self.received = 0  # the number of the signal
        self.handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.handlers = {number: signal.signal(number, self._first_signal) for number in self.SIGNALS}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _first_signal(self, number: int, *_: Any) -> None:
        self.received = number
        self._restore_handlers()
        say(f"\n{signal.Signals(number).name}: ending this step, then a checkpoint (once more: stop now)")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(trainer.val_check_batch, int)
        micro_batches = batch_idx + 1
        if micro_batches % trainer.accumulate_grad_batches:
            return
        self.data.advance()
        # the ranks get the signal at different steps, or only one of them does: they stop together
        received = torch.tensor(self.received, device=trainer.strategy.root_device)
        self.received = int(trainer.strategy.reduce(received, reduce_op="max"))
        trainer.should_stop = trainer.global_step >= trainer.max_steps  # Lightning validates before it stops
        if self.received and not trainer.should_stop and micro_batches % trainer.val_check_batch:
            assert isinstance(module, MedusaModule)
            module.validation_metrics = {}  # those of an earlier step
            self.save(trainer, module)
            raise Stopped(self.received)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.save(trainer, module)
            if self.received and not trainer.should_stop:
                raise Stopped(self.received)

    def save(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, MedusaModule)
        place = self.folder / f"step-{trainer.global_step:06d}"
        part = place.with_name(place.name + ".part")
        if trainer.is_global_zero:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        trainer.strategy.barrier()
        trainer.save_checkpoint(part / "trainer.ckpt")
        state = whole_state(trainer, module)
        if trainer.is_global_zero:
            tree = [list(path) for path in module.tree.paths] if module.tree else []
            reached = {"step": trainer.global_step, "metrics": module.validation_metrics, "tree": tree}
            record = {**self.record, **reached, "world_size": trainer.world_size}
            write_heads(part, state, module.heads, module.vocabulary, record)
            if place.exists():
                shutil.rmtree(place)
            part.rename(place)
            drop_superseded(self.folder)
        trainer.strategy.barrier()


def whole_state(trainer: L.Trainer, module: MedusaModule) -> dict[str, Tensor]:
    """The heads' fp32 tensors in full, whatever the strategy shards and in whatever dtype it multiplies."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return module.heads.state_dict()
    from deepspeed.utils import safe_get_full_fp32_param

    # a collective: every rank has to ask
    return {name: safe_get_full_fp32_param(parameter) for name, parameter in module.heads.named_parameters()}


class Progress(Callback):
    """One bar for the whole run, with loss, replayed acceptance length and speed.

    Speed: positions trained a second over all ranks, validation and checkpoints left out.
    """

    def __init__(self) -> None:
        self.positions, self.seconds, self.began = 0, 0.0, 0.0
        self.figures: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="train",
            unit="step",
            disable=not trainer.is_global_zero,
            smoothing=0,
        )

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, index: int) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        assert isinstance(module, MedusaModule)
        self.positions += len(batch.hidden_ND) * trainer.world_size
        self.seconds += time.perf_counter() - self.began
        self.bar.update(trainer.global_step - self.bar.n)
        if trainer.global_step % module.log_every == 0:
            speed = self.positions / self.seconds
            module.report({"train/positions_per_s": speed}, trainer.global_step)
            self.positions, self.seconds = 0, 0.0
            self._show(loss=f"{float(outputs['loss']):.3f}", positions_per_s=f"{speed:,.0f}")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, MedusaModule)
        if trainer.state.fn == "fit":
            metrics = module.validation_metrics
            tree, chain = metrics["heldout/acceptance_tree"], metrics["heldout/acceptance_chain"]
            self._show(tree=f"{tree:.3f}", chain=f"{chain:.3f}")

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.bar.close()

    def _show(self, **figures: str) -> None:
        self.figures |= figures
        self.bar.set_postfix(self.figures)


class MetricsTable(Logger):
    """metrics.csv: a row "step,metric,value" each. A resumed run continues the file from the step it resumes at."""

    def __init__(self, save_dir: str | Path):
        super().__init__()
        self.file = Path(save_dir) / "metrics.csv"

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        return self.file

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass  # config.yaml of the run folder holds them

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        new = not self.file.exists()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", "metric", "value"])
            writer.writerows([step, name, value] for name, value in metrics.items())

    @rank_zero_only
    def resume(self, step: int) -> None:
        """Drop what a killed run logged after the checkpoint it resumes from."""
        if self.file.exists():
            header, *rows = read_metrics(self.file)
            with self.file.open("w", newline="") as file:
                csv.writer(file).writerows([header, *(row for row in rows if int(row[0]) <= step)])


def build_loggers(run_dir: str, name: str, wandb_project: str | None) -> list[Logger]:
    """metrics.csv always; Weights & Biases too when a project is named, offline where no key is configured."""
    table = MetricsTable(run_dir)
    if wandb_project is None:
        return [table]
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    offline = not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False)
    if offline:
        say("no W&B key found: logging offline; `wandb login`, then `wandb sync` uploads the run")
    # not offline=: Lightning sets a mode for it that newer versions of wandb do not know
    mode: Any = {"mode": "offline"} if offline else {}
    # a fixed id: the same run goes on after a resume
    run_id = hashlib.sha256(str(Path(run_dir).absolute()).encode()).hexdigest()[:12]
    logger = WandbLogger(project=wandb_project, name=name, id=run_id, resume="allow", save_dir=run_dir, **mode)
    return [table, logger]


def read_metrics(file: Path) -> list[list[str]]:
    with file.open(newline="") as opened:
        return list(csv.reader(opened))
