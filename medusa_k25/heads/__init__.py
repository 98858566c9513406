"""Head architectures. A new type is one file here, its line in HEADS and one file in conf/heads."""

from medusa_k25.heads.base import Embed, Heads
from medusa_k25.heads.embeddings import Embeddings
from medusa_k25.heads.hydra import HydraHeads
from medusa_k25.heads.recurrent import RecurrentHeads
from medusa_k25.heads.residual import ResidualHeads
from medusa_k25.heads.residual_root import ResidualRootHeads
from medusa_k25.heads.speculator import Speculator
from medusa_k25.heads.vocabulary import DraftVocabulary

HEADS: dict[str, type[Heads]] = {  # by the names that checkpoints and exports carry
    "residual": ResidualHeads,
    "residual_root": ResidualRootHeads,
    "hydra": HydraHeads,
    "recurrent": RecurrentHeads,
}


def kind_of(heads: Heads) -> str:
    """The name of its type in HEADS."""
    return next(name for name, kind in HEADS.items() if kind is type(heads))


__all__ = [
    "HEADS",
    "DraftVocabulary",
    "Embed",
    "Embeddings",
    "Heads",
    "HydraHeads",
    "RecurrentHeads",
    "ResidualHeads",
    "ResidualRootHeads",
    "Speculator",
    "kind_of",
]
