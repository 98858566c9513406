"""Heads with all that they need to draft for a target.

Letters: N positions, D hidden, M draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_k25.heads.base import Embed, Heads
from medusa_k25.heads.embeddings import Embeddings
from medusa_k25.heads.vocabulary import DraftVocabulary
from medusa_k25.target import Target


@dataclass(frozen=True, eq=False)
class Speculator:
    """lm_head_MD: the target's rows of the draft vocabulary. embed: None for heads that read the hidden state alone.

    The heads compute in the dtype of lm_head_MD, on its device.
    """

    heads: Heads
    vocabulary: DraftVocabulary
    lm_head_MD: Tensor
    embed: Embed | None = None

    @classmethod
    def of(
        cls, heads: Heads, vocabulary: DraftVocabulary, target: Target, device: str | torch.device = "cpu"
    ) -> "Speculator":
        """In float32, with what the heads share of `target` read from its checkpoint."""
        lm_head_MD = vocabulary.rows(target.lm_head).to(device, torch.float32)
        embed = None if heads.reads == "state" else Embeddings(target.embeddings).to(device)
        return cls(heads.float().to(device), vocabulary, lm_head_MD, embed)

    def features(self, hidden_ND: Tensor, path_NK: Tensor) -> Tensor:
        """`Heads.forward` [K, N, D], in the dtype of lm_head_MD."""
        return self.heads(hidden_ND.to(self.lm_head_MD.device, self.lm_head_MD.dtype), path_NK, self.embed)
