"""What every head architecture offers.

Letters: N positions, D hidden, K heads.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Heads(nn.Module, ABC):
    """K heads over one hidden state. Constructor arguments are kept as attributes: checkpoints record them."""

    hidden_size: int
    num_heads: int

    @abstractmethod
    def forward(self, hidden_ND: Tensor, path_NK: Tensor) -> Tensor:
        """Features [K, N, D]; the logits of head k are lm_head of its features. At step 0 they equal h_t.

        hidden_ND: h_t. path_NK int64: the tokens known when head k drafts, x_{t+1} (the root) .. x_{t+K}; head k
        (1-based) may read the first k columns. IGNORE stands for a token beyond the answer's end.
        """
