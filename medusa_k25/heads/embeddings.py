"""The target's input embeddings, as heads read them.

Letters: V target vocabulary, D hidden.
"""

from torch import Tensor, nn

from medusa_k25.data.labels import IGNORE


class Embeddings(nn.Module):
    """Frozen rows [V, D] in any dtype, in no optimizer and no checkpoint: a buffer that goes where its module goes."""

    weight_VD: Tensor

    def __init__(self, weight_VD: Tensor):
        super().__init__()
        self.register_buffer("weight_VD", weight_VD, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings of ids int64 [..], scaled to a root mean square of 1, fp32 [.., D]; zeros for IGNORE."""
        return unit_rms(self.weight_VD[ids.clamp(min=0)]) * (ids != IGNORE)[..., None]


def unit_rms(rows: Tensor) -> Tensor:
    """Each row [.., D] divided by the root of its mean square, fp32; a row of zeros stays one.

    Targets scale their embeddings as they like, and the first norm behind them does not care; heads would.
    """
    rows = rows.float()
    return rows * (rows.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
