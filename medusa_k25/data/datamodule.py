"""The cache as Lightning sees it: shuffled training windows, and whole answers for validation.

Letters: S states of one answer, D hidden, K heads, V target vocabulary, W windows.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from medusa_k25.cache import Cache
from medusa_k25.cache.staging import Stage
from medusa_k25.data.sampler import Position, StepShares
from medusa_k25.data.splits import SPLITS, Split
from medusa_k25.data.windows import Run, Windows, documents_of, future_of, in_share, runs_of

VALIDATION_SPLITS: tuple[Split, ...] = ("calibration", "heldout", "train")  # in the order of val_dataloader


class Answer(NamedTuple):
    """A whole answer: its states, `labels.future_tokens` of each, and the label of its conversation."""

    hidden_SD: Tensor
    future_SK: Tensor  # int64 [S, K+1]
    label: str | None


class Answers(Dataset):
    """Whole answers, for validation."""

    def __init__(self, cache: Cache, runs: Sequence[Run], num_heads: int):
        self.cache, self.runs, self.num_heads = cache, runs, num_heads

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> Answer:
        run = self.runs[index]
        hidden_SD = self.cache.read_rows(run.document.shard, run.row_start, run.row_stop)
        return Answer(hidden_SD, future_of(self.cache, run, self.num_heads), run.document.label)


class EqualShares(Sampler[list[int]]):
    """One sample a batch, dealt out over the ranks; every rank gets as many batches, if need be empty ones."""

    def __init__(self, num_samples: int, rank: int, world_size: int):
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size

    def __len__(self) -> int:
        return -(-self.num_samples // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        for i in range(self.rank, len(self) * self.world_size, self.world_size):
            yield [i] if i < self.num_samples else []


def only(answers: Sequence[Answer], empty: Answer) -> Answer:
    """The one answer of a batch, or `empty` where a rank has none left."""
    return answers[0] if answers else empty


def leave_signals_to_the_rank(worker: int) -> None:
    """A rank that is told to stop still needs its data for the running step, and signals reach whole process groups.

    SIGTERM keeps its meaning: with it Python ends the workers of a process that fails.
    """
    os.setpgrp()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def mixed(runs: Sequence[Run]) -> list[Run]:
    """Answers in an order that is mixed, but always the same: the first ones are a fair sample.

    `trainer.limit_val_batches` takes the first ones too.
    """
    order = torch.randperm(len(runs), generator=torch.Generator().manual_seed(0)).tolist()
    return [runs[i] for i in order]


class MedusaData(L.LightningDataModule):
    """`window` positions are read in one go (consecutive on disk); a micro-batch takes `batch_size` windows a rank.

    With `teacher_states` the states that a distillation loss needs are read too (`windows.Batch`). With `stage_dir`
    the shards are copied there while training reads, at most `stage_gb`, and read from there where they are.
    With a `share` below 1 a run learns from that part of the training documents: points of a learning curve.
    """

    def __init__(
        self,
        cache: Cache,
        num_heads: int,
        draftable_V: Tensor,
        teacher_states: bool,
        window: int,
        batch_size: int,
        num_workers: int,
        stage_dir: str | None,
        stage_gb: float,
        seed: int,
        share: float,
    ):
        super().__init__()
        if window < 1 or batch_size < 1 or num_workers < 0:
            raise ValueError(
                "expected data.window and data.batch_size of at least 1 and data.num_workers of at least 0, "
                f"got {window}, {batch_size} and {num_workers}"
            )
        self.cache, self.num_heads, self.batch_size = cache, num_heads, batch_size
        self.num_workers, self.seed = num_workers, seed
        self.position = Position()
        self.documents = {split: documents_of(cache, split) for split in SPLITS}
        self.left_out = len(cache.documents) - sum(len(documents) for documents in self.documents.values())
        for split, documents in self.documents.items():
            if not documents:
                raise ValueError(
                    f"cache {cache.path} has no {split} documents among {len(cache.documents)}; "
                    "capture more conversations, or conversations on more topics"
                )
        self.documents["train"] = in_share(self.documents["train"], share)
        self.windows = Windows(cache, self.documents["train"], window, num_heads, teacher_states)
        if not len(self.windows):
            raise ValueError(f"cache {cache.path}: no training answer has two tokens, so there is nothing to predict")
        self.label_counts_WK = self.windows.label_counts(draftable_V)
        calibration, heldout = (
            mixed([run for document in self.documents[split] for run in runs_of(cache, document)])
            for split in VALIDATION_SPLITS[:2]
        )
        self.validation_runs = [calibration, heldout, mixed(self.windows.runs)[: len(heldout)]]
        self.stage: Stage | None = None
        if stage_dir is not None:
            read = (document.shard for split in reversed(VALIDATION_SPLITS) for document in self.documents[split])
            self.stage = Stage(cache, Path(stage_dir), stage_gb * 1e9, list(dict.fromkeys(read)))  # for training first

    def setup(self, stage: str) -> None:
        if self.stage is not None and self._trainer().local_rank == 0:  # one process a machine copies
            self.stage.start()

    def teardown(self, stage: str) -> None:
        if self.stage is not None:
            self.stage.stop()

    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")

    def refuse_idle_ranks(self, world_size: int) -> None:
        """ValueError when a rank would have nothing to train on, ever."""
        if len(self.windows) < world_size:
            raise ValueError(
                f"{len(self.windows)} training windows for {world_size} ranks: a rank would have nothing to do; "
                "use fewer devices, a smaller data.window or more conversations"
            )

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None
        return self.trainer

    def train_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        shares = StepShares(
            self.label_counts_WK,
            self.batch_size,
            trainer.accumulate_grad_batches,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            self.position,
        )
        return DataLoader(
            self.windows,
            batch_size=None,  # a share is a whole micro-batch already
            sampler=shares,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_rank,
            pin_memory=torch.cuda.is_available(),
        )

    def val_dataloader(self) -> list[DataLoader]:
        """Calibration text, held-out text, and as many answers of training text, so that over-fitting shows."""
        return [self._answers(runs) for runs in self.validation_runs]

    def _answers(self, runs: Sequence[Run]) -> DataLoader:
        answers = Answers(self.cache, runs, self.num_heads)
        trainer = self._trainer()
        return DataLoader(
            answers,
            batch_sampler=EqualShares(len(answers), trainer.global_rank, trainer.world_size),
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_rank,
            collate_fn=partial(only, empty=self._no_answer()),
            pin_memory=torch.cuda.is_available(),
        )

    def _no_answer(self) -> Answer:
        hidden_SD = self.cache.read_rows(self.windows.runs[0].document.shard, 0, 0)
        return Answer(hidden_SD, torch.empty(0, self.num_heads + 1, dtype=torch.long), None)

    def advance(self) -> None:
        """Count one step as consumed."""
        trainer = self._trainer()
        self.position.consumed += self.batch_size * trainer.accumulate_grad_batches * trainer.world_size
        if self.position.consumed >= len(self.windows):
            self.position.epoch, self.position.consumed = self.position.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.position.epoch, "consumed": self.position.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position.epoch, self.position.consumed = state_dict["epoch"], state_dict["consumed"]
