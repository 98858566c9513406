"""Own lm_heads: a trained matrix over the draft vocabulary for every head.

Letters: D hidden, K heads, M draft vocabulary.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


class LmHeads(nn.Module):
    """One parameter, `weight` [K, M, D]. It is NaN until `Heads.init_lm_heads` or a checkpoint fills it."""

    def __init__(self, num_heads: int, draft_vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_heads, draft_vocab_size, hidden_size), torch.nan))

    def forward(self, use: Callable[[Tensor], Result]) -> Result:
        """`use(weight)`: under DeepSpeed ZeRO-3 a parameter is whole only while its own module's forward runs."""
        return use(self.weight)
