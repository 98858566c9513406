"""An order of samples that is a pure function of (seed, epoch, consumed samples), so that training resumes exactly.

Letters: W windows, K heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler


@dataclass
class Position:
    """Where training stands: `consumed` windows of `epoch`, over all ranks and micro-batches."""

    epoch: int = 0
    consumed: int = 0


class Share(NamedTuple):
    """What one rank takes in one micro-batch of a step."""

    windows: list[int]
    count_K: Tensor  # labels of each head in the whole step, over all ranks and micro-batches


class StepShares(Sampler[Share]):
    """This rank's shares, micro-batch after micro-batch, without an end; every window once an epoch.

    A step takes `batch_size` windows a rank and micro-batch. The last one of an epoch takes what is left, dealt out
    evenly; a rank may get nothing there, so all ranks take the same number of steps. Which windows a step takes depends
    on how many it takes, not on how they are dealt out: 1 rank and 2 ranks of half the batch size see the same steps.
    The position is read when iteration begins, not when the sampler is built: the loader exists before the checkpoint
    is restored. There is no end because epochs are counted here, and by nobody else.

    label_counts_WK int64: labels of each head in each window.
    """

    def __init__(
        self,
        label_counts_WK: Tensor,
        batch_size: int,
        accumulate: int,
        seed: int,
        rank: int,
        world_size: int,
        position: Position,
    ):
        self.label_counts_WK, self.batch_size, self.accumulate = label_counts_WK, batch_size, accumulate
        self.seed, self.rank, self.world_size, self.position = seed, rank, world_size, position

    def __iter__(self) -> Iterator[Share]:
        epoch, consumed = self.position.epoch, self.position.consumed
        parts = self.world_size * self.accumulate
        size = self.batch_size * parts
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.label_counts_WK), generator=generator).tolist()
            for first in range(consumed, len(order), size):
                step = order[first : first + size]
                count_K = self.label_counts_WK[step].sum(dim=0)
                for micro_batch in range(self.accumulate):
                    yield Share(step[micro_batch * self.world_size + self.rank :: parts], count_K)
            epoch, consumed = epoch + 1, 0
