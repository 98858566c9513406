"""What happens around training: checkpoints, stopping, speed."""

import os
import resource
import shutil
import signal
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from tqdm import tqdm

from medusa_k25.checkpoint import SCORE, drop_superseded, waited_enough, write_heads
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.labels import IGNORE
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
    the running step, with a checkpoint; a second Ctrl-C stops at once, without. A checkpoint is written beside its
    place and renamed when it is whole. `record` is the provenance that goes into heads.json with step, metrics, tree.

    Training ends early after `patience` validations in a row none of which is the best so far; None: never.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, folder: Path, data: MedusaData, record: Mapping[str, Any], patience: int | None = None):
        self.folder, self.data, self.record, self.patience = folder, data, record, patience
        self.best, self.validations_since_best = -inf, 0
        self.received = 0  # the number of the signal that this rank got
        self.agreed = 0  # that any rank had got by the end of the step
        self.handlers: dict[signal.Signals, Any] = {}

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.handlers = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        # Lightning would install its own next, which broadcasts from inside the handler: a rank alone in it hangs
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        if trainer.is_global_zero:
            for part in self.folder.glob("step-*.part"):  # what a kill has left
                shutil.rmtree(part)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, *_: Any) -> None:
        if not self.received:  # schedulers repeat themselves
            say(f"\n{signal.Signals(number).name}: ending this step, then a checkpoint")
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

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
        self.agreed = int(trainer.strategy.reduce(received, reduce_op="max"))
        trainer.should_stop = trainer.global_step >= trainer.max_steps  # Lightning validates before it stops
        if self.agreed and not trainer.should_stop and micro_batches % trainer.val_check_batch:
            assert isinstance(module, MedusaModule)
            module.validation_metrics = {}  # those of an earlier step
            self.save(trainer, module)
            raise Stopped(self.agreed)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            assert isinstance(module, MedusaModule)
            score = module.validation_metrics[SCORE]  # the same on all ranks, which therefore stop together
            self.validations_since_best = 0 if score >= self.best else self.validations_since_best + 1
            self.best = max(self.best, score)
            if waited_enough(self.validations_since_best, self.patience) and not trainer.should_stop:
                say(
                    f"\nno faster on calibration text for {self.validations_since_best} validations: "
                    f"ended at step {trainer.global_step} of {trainer.max_steps}"
                )
                trainer.should_stop = True
            self.save(trainer, module)
            if self.agreed and not trainer.should_stop:  # a signal during validation: after the next step
                raise Stopped(self.agreed)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "validations_since_best": self.validations_since_best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.validations_since_best = state_dict["best"], state_dict["validations_since_best"]

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
            chosen = module.tree if module.validation_metrics else None  # else it is that of an earlier step
            tree = [list(path) for path in chosen.paths] if chosen else []
            reached = {"step": trainer.global_step, "metrics": module.validation_metrics, "tree": tree}
            since = {"validations_since_best": self.validations_since_best}
            record = {**self.record, **reached, **since, "world_size": trainer.world_size}
            write_heads(part, state, module.heads, module.vocabulary, record)
            for file in part.rglob("*"):
                if file.is_file():  # on disk before the name says so, and before another one is dropped
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
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
    """One bar for the whole run, and what a step costs, logged every `log_every` steps over all ranks:

    train/positions_per_s  positions trained a second, validation and checkpoints left out
    train/data_wait        share of that time in which this rank waited for its data
    train/mfu              share of `peak_flops` (of one device) that the heads' and the loss's products made use of
    train/grad_norm        before clipping
    train/learning_rate    of the step
    train/memory_GB        the most that this rank's device held; on a CPU, the process
    """

    def __init__(self, flops_per_position: float, peak_flops: float) -> None:
        self.flops_per_position, self.peak_flops = flops_per_position, peak_flops
        self.positions: Tensor | float = 0.0
        self.seconds, self.waited, self.mark = 0.0, 0.0, 0.0
        self.grad_norm: Tensor | float = 0.0
        self.learning_rate = 0.0
        self.figures: dict[str, str] = {}
        self.bar = tqdm(desc="train", unit="step", disable=True)  # the real one when training starts

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        off = not trainer.is_global_zero
        step, last = trainer.global_step, trainer.max_steps
        self.bar = tqdm(desc="train", unit="step", initial=step, total=last, smoothing=0, disable=off)
        self.mark = time.perf_counter()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, index: int) -> None:
        self.waited += self._since_mark()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> None:
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]
        if not isinstance(trainer.strategy, DeepSpeedStrategy):  # there gradients are shared out among the ranks
            self.grad_norm = get_total_norm(p.grad for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Batch, index: int
    ) -> None:
        assert isinstance(module, MedusaModule)
        self.positions = self.positions + (batch.future_NK[:, 0] != IGNORE).sum()
        if (index + 1) % trainer.accumulate_grad_batches:
            return
        self.bar.update(trainer.global_step - self.bar.n)
        if trainer.global_step % module.log_every == 0:
            if isinstance(trainer.strategy, DeepSpeedStrategy):
                self.grad_norm = trainer.strategy.deepspeed_engine.get_global_grad_norm()
            positions = float(self.positions) * trainer.world_size  # every rank's share is as large
            self._since_mark()  # after the line above, which waits for the device
            speed = positions / self.seconds
            figures = {
                "train/positions_per_s": speed,
                "train/data_wait": self.waited / self.seconds,
                "train/mfu": speed * self.flops_per_position / (self.peak_flops * trainer.world_size),
                "train/grad_norm": float(self.grad_norm),
                "train/learning_rate": self.learning_rate,
                "train/memory_GB": peak_memory(module.device) / 1e9,
            }
            module.report(figures, trainer.global_step)
            self.positions, self.seconds, self.waited = 0.0, 0.0, 0.0
            self._show(loss_head1=f"{module.loss_K[0]:.3f}", positions_per_s=f"{speed:,.0f}")
        self._since_mark()

    def _since_mark(self) -> float:
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.seconds += seconds
        return seconds

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, MedusaModule)
        if trainer.state.fn == "fit":
            metrics = module.validation_metrics
            tree, chain = metrics["heldout/acceptance_tree"], metrics["heldout/acceptance_chain"]
            speed = metrics["heldout/tokens_per_s"]
            self._show(tree=f"{tree:.3f}", chain=f"{chain:.3f}", serving=f"{speed:.1f} tok/s")
            self.mark = time.perf_counter()

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.bar.close()

    def _show(self, **figures: str) -> None:
        self.figures |= figures
        self.bar.set_postfix(self.figures)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
