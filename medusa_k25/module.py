"""Training of heads on cached states, as a Lightning module.

Letters: N positions, S states of one answer, D hidden, K heads, M draft vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from math import cos, isfinite, pi
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from medusa_k25.data.datamodule import VALIDATION_SPLITS, Answer
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import Batch
from medusa_k25.heads import DraftVocabulary, Embeddings, Heads, Speculator
from medusa_k25.loss import MedusaLoss, Teacher
from medusa_k25.metrics import top_accuracy
from medusa_k25.replay import Acceptance, fastest_tree, future_ranks, replay
from medusa_k25.tree import Tree

Item = TypeVar("Item")


class Validated(NamedTuple):
    """One answer: the ranks of its labels, which of them exist, and the label of its conversation."""

    ranks_SK: Tensor
    exists_SK: Tensor
    label: str | None


class Counts(NamedTuple):
    """What one answer adds to the figures of its split."""

    tree: Acceptance
    chain: Acceptance
    hits_KR: Tensor
    count_K: Tensor
    label: str | None


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


def acceptance(answers: Sequence[Counts]) -> dict[str, Acceptance]:
    """Of the tree and of the chain, over all `answers`."""
    return {
        "tree": sum((answer.tree for answer in answers), Acceptance()),
        "chain": sum((answer.chain for answer in answers), Acceptance()),
    }


def figures(answers: Sequence[Counts]) -> dict[str, float]:
    """The figures of a split, see MedusaModule."""
    accepted = acceptance(answers)
    found = {f"acceptance_{shape}": counted.length for shape, counted in accepted.items()}
    hits_KR = torch.stack([answer.hits_KR for answer in answers]).sum(dim=0)
    count_K = torch.stack([answer.count_K for answer in answers]).sum(dim=0)
    for k, shares in enumerate((hits_KR / count_K[:, None].clamp(min=1)).tolist(), start=1):
        found |= {f"top{top}_head{k}": share for top, share in enumerate(shares, start=1)}
        passes = sum(count for drafts, count in accepted["tree"].accepted.items() if drafts >= k)
        found[f"accepted_head{k}"] = passes / accepted["tree"].passes
    return found


class MedusaModule(L.LightningModule):
    """Heads to train, the frozen lm_head rows and embeddings of the target that they share, and what is measured.

    `lm_head_MD` is a non-persistent buffer, in no optimizer and in no checkpoint; so is what `embed` holds, None for
    heads that read no tokens. `optimizer` and `schedule` are called
    with the parameters and with max_steps. Validation replays whole answers: of the best trees of all sizes in
    `cycle_ms` it chooses the fastest on calibration text, and reports what it and the chain accept on every split:

    SPLIT/acceptance_tree   acceptance length; of held-out conversations with a label also heldout/acceptance_tree/LABEL
    SPLIT/acceptance_chain  likewise
    SPLIT/accepted_headK    share of the tree's passes that accepted drafts of heads 1 to K
    SPLIT/topR_headK        share of the labels that are among the head's R best choices
    SPLIT/tokens_per_s      what one request would get from the tree
    SPLIT/speedup           against no speculation; on calibration text it decides which checkpoint is the best
    num_nodes               of the tree, the root included
    break_even              the acceptance length from which on it pays

    cycle_ms: what a verify pass takes on the machine that serves, by its number of nodes. baseline_tok_s: of one
    request there without speculation.
    """

    lm_head_MD: Tensor

    def __init__(
        self,
        heads: Heads,
        vocabulary: DraftVocabulary,
        lm_head_MD: Tensor,
        embed: Embeddings | None,
        loss: MedusaLoss,
        optimizer: Callable[..., Optimizer],
        schedule: Callable[..., Callable[[int], float]],
        cycle_ms: Mapping[int, float],
        baseline_tok_s: float,
        max_width: int,
        log_every: int,
    ):
        super().__init__()
        if max_width < 1:
            raise ValueError(f"expected max_width >= 1, got {max_width}")
        self.heads, self.vocabulary, self.loss = heads, vocabulary, loss
        self.register_buffer("lm_head_MD", lm_head_MD, persistent=False)
        self.embed = embed
        self.optimizer, self.schedule = optimizer, schedule
        self.cycle_ms, self.baseline_tok_s = cycle_ms, baseline_tok_s
        self.max_width, self.log_every = max_width, log_every
        self.tree: Tree | None = None  # chosen at the latest validation
        self.validation_metrics: dict[str, float] = {}
        self.loss_K: list[float] = []  # mean loss of each head when it was last logged
        self._sum_K = torch.zeros(heads.num_heads)  # this rank's loss of the step so far
        self._validated: dict[str, list[Validated]] = {}  # this rank's share

    def features_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features [K, N, D] and draft-vocabulary labels [K, N]."""
        features_KND = self.heads(batch.hidden_ND, batch.future_NK[:, :-1], self.embed)
        return features_KND, self.vocabulary.to_draft(batch.future_NK[:, 1:]).T

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch = batch._replace(hidden_ND=batch.hidden_ND.to(self.lm_head_MD.dtype))
        features_KND, labels_KN = self.features_and_labels(batch)
        teacher = Teacher(batch.hidden_ND, self.lm_head_MD) if self.loss.needs_teacher else None
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
            if not all(isfinite(loss) for loss in self.loss_K):
                raise ValueError(f"the loss of step {step} is {self.loss_K}: training has diverged; lower optimizer.lr")
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
        self._validated = {split: [] for split in VALIDATION_SPLITS}

    def validation_step(self, batch: Answer, batch_idx: int, dataloader_idx: int = 0) -> None:
        speculator = Speculator(self.heads, self.vocabulary, self.lm_head_MD, self.embed)
        # for a rank without an answer, too: under ZeRO-3 the others wait for its share of the weights
        ranks_SK = future_ranks(speculator, batch.hidden_SD, batch.future_SK)
        if len(ranks_SK):
            exists_SK = (batch.future_SK[:, 1:] != IGNORE).cpu()
            self._validated[VALIDATION_SPLITS[dataloader_idx]].append(Validated(ranks_SK, exists_SK, batch.label))

    def on_validation_epoch_end(self) -> None:
        ranks = self._from_all_ranks([answer.ranks_SK for answer in self._validated["calibration"]])
        self.tree = fastest_tree(ranks, self.cycle_ms, self.max_width)
        # text without enough paths gives a smaller tree, which is padded to the size that it was asked for
        cycle_ms = self.cycle_ms[min(nodes for nodes in self.cycle_ms if nodes >= self.tree.num_nodes)]
        metrics: dict[str, float] = {
            "num_nodes": self.tree.num_nodes,
            "break_even": cycle_ms * self.baseline_tok_s / 1000,
        }
        for split in VALIDATION_SPLITS:
            # every rank walks its own answers; what the others need is small
            answers = self._from_all_ranks([self._count(answer, self.tree) for answer in self._validated[split]])
            metrics |= {f"{split}/{name}": value for name, value in figures(answers).items()}
            length = metrics[f"{split}/acceptance_tree"]
            metrics[f"{split}/tokens_per_s"] = 1000 * length / cycle_ms
            metrics[f"{split}/speedup"] = length / metrics["break_even"]
            if split == "heldout":
                for label in sorted({answer.label for answer in answers if answer.label is not None}):
                    labelled = [answer for answer in answers if answer.label == label]
                    for shape, accepted in acceptance(labelled).items():
                        metrics[f"heldout/acceptance_{shape}/{label}"] = accepted.length
        self.validation_metrics = metrics
        self.report(metrics, self.trainer.global_step)

    def _count(self, answer: Validated, tree: Tree) -> Counts:
        trees = (tree, Tree.chain(self.heads.num_heads))
        in_tree, in_chain = (replay([answer.ranks_SK], shape) for shape in trees)
        hits_KR, count_K = top_accuracy(answer.ranks_SK.T, answer.exists_SK.T)
        return Counts(in_tree, in_chain, hits_KR, count_K, answer.label)

    def _from_all_ranks(self, items: list[Item]) -> list[Item]:
        if self.trainer.world_size == 1:
            return items
        shares: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(shares, items)
        return [item for share in shares for item in share]

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer(self.parameters())
        scheduler = LambdaLR(optimizer, self.schedule(max_steps=self.trainer.max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
