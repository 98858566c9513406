"""Training of heads on cached states, as a Lightning module.

Letters: N positions, S states of one answer, D hidden, K heads, M draft vocabulary.
"""

from collections.abc import Callable
from math import cos, pi
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from medusa_k25.data.datamodule import Answer
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import Batch
from medusa_k25.heads import DraftVocabulary, Heads
from medusa_k25.loss import MedusaLoss, Teacher
from medusa_k25.metrics import top_accuracy
from medusa_k25.replay import best_tree, future_ranks, replay
from medusa_k25.tree import Tree

VALIDATION_SPLITS = ("calibration", "heldout")  # in the order of MedusaData.val_dataloader


def warmup_cosine(warmup_fraction: float, final_fraction: float, max_steps: int) -> Callable[[int], float]:
    """Learning-rate factor at a step: up linearly over a fraction of `max_steps`, then down a half cosine."""
    if not 0 <= warmup_fraction < 1 or not 0 <= final_fraction <= 1:
        raise ValueError(
            f"schedule: expected 0 <= warmup_fraction < 1 and 0 <= final_fraction <= 1, "
            f"got {warmup_fraction} and {final_fraction}"
        )
    warmup_steps = round(warmup_fraction * max_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (max_steps - warmup_steps))
        return final_fraction + (1 - final_fraction) * (1 + cos(pi * progress)) / 2

    return factor


class MedusaModule(L.LightningModule):
    """Heads to train, the frozen lm_head rows they share, and what is measured.

    `lm_head_MD` is a non-persistent buffer: in no optimizer and in no checkpoint. `optimizer` and `schedule` are called
    with the parameters and with max_steps. Validation replays whole answers: it chooses the best tree of `num_nodes`
    nodes on calibration text and reports the acceptance length of that tree and of the chain on both splits.
    """

    lm_head_MD: Tensor

    def __init__(
        self,
        heads: Heads,
        vocabulary: DraftVocabulary,
        lm_head_MD: Tensor,
        loss: MedusaLoss,
        optimizer: Callable[..., Optimizer],
        schedule: Callable[..., Callable[[int], float]],
        num_nodes: int,
        max_width: int,
        log_every: int,
    ):
        super().__init__()
        if num_nodes < 2 or max_width < 1:
            raise ValueError(f"expected num_nodes >= 2 and max_width >= 1, got {num_nodes} and {max_width}")
        self.heads, self.vocabulary, self.loss = heads, vocabulary, loss
        self.register_buffer("lm_head_MD", lm_head_MD, persistent=False)
        self.optimizer, self.schedule = optimizer, schedule
        self.num_nodes, self.max_width, self.log_every = num_nodes, max_width, log_every
        self.tree: Tree | None = None  # chosen at the latest validation
        self.validation_metrics: dict[str, float] = {}
        self.loss_K: list[float] = []  # mean loss of each head when it was last logged
        self._sum_K = torch.zeros(heads.num_heads)  # this rank's loss of the step so far
        self._ranks: dict[str, list[Tensor]] = {}
        self._exists: dict[str, list[Tensor]] = {}

    def features_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features [K, N, D] and draft-vocabulary labels [K, N]."""
        hidden_ND = batch.hidden_ND.to(self.lm_head_MD.dtype)
        return self.heads(hidden_ND, batch.future_NK[:, :-1]), self.vocabulary.to_draft(batch.future_NK[:, 1:]).T

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features_KND, labels_KN = self.features_and_labels(batch)
        teacher = (
            Teacher(batch.hidden_ND.to(self.lm_head_MD.dtype), self.lm_head_MD) if self.loss.needs_teacher else None
        )
        total, sum_K = self.heads.with_lm_head(
            self.lm_head_MD, lambda lm_head: self.loss(features_KND, lm_head, labels_KN, batch.count_K, teacher)
        )
        accumulate = self.trainer.accumulate_grad_batches
        self._sum_K = sum_K if batch_idx % accumulate == 0 else self._sum_K + sum_K
        step = self.trainer.global_step + 1
        if step % self.log_every == 0 and (batch_idx + 1) % accumulate == 0:
            step_sum_K = self.trainer.strategy.reduce(self._sum_K, reduce_op="sum")
            self.loss_K = (step_sum_K / batch.count_K.clamp(min=1)).tolist()
            self.report({f"train/loss_head{k}": loss for k, loss in enumerate(self.loss_K, start=1)}, step)
        # The total is divided by the labels of the whole step already, and the engines average over ranks and
        # micro-batches: Lightning over the latter, and DeepSpeed once more.
        averaged = accumulate**2 if self.trainer.strategy.handles_gradient_accumulation else accumulate
        return total * (self.trainer.world_size * averaged)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Another number of micro-batches a step: Lightning counts micro-batches, so its count is set to the steps."""
        loop = checkpoint["loops"]["fit_loop"]
        micro_batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        for count in ("total", "current"):
            done = dict.fromkeys(("ready", "started", "processed", "completed"), micro_batches)
            loop["epoch_loop.batch_progress"][count].update(done)

    def report(self, metrics: dict[str, float], step: int) -> None:
        """To all loggers, past Lightning: its own count of steps is one off at validation, and after a resume."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step)

    def on_validation_epoch_start(self) -> None:
        self._ranks = {split: [] for split in VALIDATION_SPLITS}
        self._exists = {split: [] for split in VALIDATION_SPLITS}

    def validation_step(self, batch: Answer, batch_idx: int, dataloader_idx: int = 0) -> None:
        hidden_SD, future_SK = batch
        hidden_SD = hidden_SD.to(self.lm_head_MD.dtype)
        # for a rank without an answer, too: under ZeRO-3 the others wait for its share of the weights
        ranks_SK = future_ranks(self.heads, self.lm_head_MD, self.vocabulary, hidden_SD, future_SK)
        if len(ranks_SK):
            split = VALIDATION_SPLITS[dataloader_idx]
            self._ranks[split].append(ranks_SK)
            self._exists[split].append((future_SK[:, 1:] != IGNORE).cpu())

    def on_validation_epoch_end(self) -> None:
        ranks = {split: self._from_all_ranks(self._ranks[split]) for split in VALIDATION_SPLITS}
        exists = {split: self._from_all_ranks(self._exists[split]) for split in VALIDATION_SPLITS}
        self.tree = best_tree(ranks["calibration"], self.num_nodes, self.max_width)
        chain = Tree.chain(self.heads.num_heads)
        metrics = {}
        for split in VALIDATION_SPLITS:
            metrics[f"{split}/acceptance_tree"] = replay(ranks[split], self.tree).length
            metrics[f"{split}/acceptance_chain"] = replay(ranks[split], chain).length
            hits_KR, count_K = top_accuracy(torch.cat(ranks[split]).T, torch.cat(exists[split]).T)
            for k, head in enumerate((hits_KR / count_K[:, None].clamp(min=1)).tolist(), start=1):
                metrics |= {f"{split}/top{top}_head{k}": value for top, value in enumerate(head, start=1)}
        self.validation_metrics = metrics
        self.report(metrics, self.trainer.global_step)

    def _from_all_ranks(self, tensors: list[Tensor]) -> list[Tensor]:
        if self.trainer.world_size == 1:
            return tensors
        shares: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(shares, tensors)
        return [tensor for share in shares for tensor in share]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer(self.parameters())
        scheduler = LambdaLR(optimizer, self.schedule(max_steps=self.trainer.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
