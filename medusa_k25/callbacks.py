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
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from medusa_k25.checkpoint import drop_superseded, write_heads
from medusa_k25.data.datamodule import Batch, MedusaData
from medusa_k25.module import MedusaModule

say = rank_zero_only(print)


class Checkpoints(Callback):
    """A checkpoint after every validation; the best and the last are kept.

    Validation also follows the last step, and the step during which Ctrl-C was pressed, which ends the training; a
    second Ctrl-C stops at once, without a checkpoint. A checkpoint is written beside its place and renamed when it is
    whole. `record` is the provenance that goes into heads.json with the step, the metrics and the tree.
    """

    def __init__(self, folder: Path, data: MedusaData, record: Mapping[str, Any]):
        self.folder, self.data, self.record = folder, data, record
        self.interrupted = False
        self.handler: Any = signal.getsignal(signal.SIGINT)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.handler = signal.signal(signal.SIGINT, self._first_interrupt)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        signal.signal(signal.SIGINT, self.handler)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        signal.signal(signal.SIGINT, self.handler)

    def _first_interrupt(self, *_: Any) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, self.handler)
        say("\ninterrupted: ending this step, then validation and a checkpoint (Ctrl-C again: stop now)")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.data.advance()
        # the ranks get the signal at different steps: they stop together
        self.interrupted = trainer.strategy.reduce_boolean_decision(self.interrupted, all=False)
        # Lightning validates before it stops
        trainer.should_stop = self.interrupted or trainer.global_step >= trainer.max_steps

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.save(trainer, module)

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
            metrics = module.validation_metrics
            tree = [list(path) for path in module.tree.paths] if module.tree else []
            record = {**self.record, "step": trainer.global_step, "metrics": metrics, "tree": tree}
            write_heads(part, state, module.heads, module.vocabulary, record)
            if place.exists():
                shutil.rmtree(place)
            part.rename(place)
            drop_superseded(self.folder)
        trainer.strategy.barrier()


def whole_state(trainer: L.Trainer, module: MedusaModule) -> dict[str, Any]:
    """The heads' tensors in full, whatever the strategy shards."""
    if getattr(trainer.strategy, "zero_stage_3", False):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(module.heads.parameters())):
            return {name: tensor.detach().cpu().clone() for name, tensor in module.heads.state_dict().items()}
    return module.heads.state_dict()


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
        self.positions += len(batch[0]) * trainer.world_size
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
