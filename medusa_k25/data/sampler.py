"""An order of samples that is a pure function of (seed, epoch, consumed samples), so that training resumes exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass
class Position:
    """Where training stands: `consumed` samples of `epoch`, over all ranks."""

    epoch: int = 0
    consumed: int = 0


class ResumableBatches(Sampler[list[int]]):
    """This rank's batches of sample indices; every sample once an epoch, whatever the world size.

    A global batch holds `batch_size` samples a rank. The last one of an epoch is shorter and dealt out evenly; a rank
    may get an empty batch there, so all ranks take the same number of steps. The position is read when iteration
    begins, not when the sampler is built: the loader exists before the checkpoint is restored. Lightning's own count of
    epochs plays no part.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, rank: int, world_size: int, position: Position):
        if num_samples < world_size:
            raise ValueError(
                f"{num_samples} training samples for {world_size} ranks: a rank would have nothing to do; "
                "use fewer devices, a smaller data.window or more conversations"
            )
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world_size, self.position = rank, world_size, position

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return -(-self.num_samples // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.position.epoch)
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        size = self.batch_size * self.world_size
        for first in range(self.position.consumed, self.num_samples, size):
            yield order[first : first + size][self.rank :: self.world_size]
