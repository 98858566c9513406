"""Head architectures. A new type is one file here, one line in HEADS and one file in conf/heads."""

from medusa_k25.heads.base import Heads
from medusa_k25.heads.residual import ResidualHeads
from medusa_k25.heads.vocabulary import DraftVocabulary

HEADS: dict[str, type[Heads]] = {"residual": ResidualHeads}  # the names that checkpoints carry

__all__ = ["HEADS", "DraftVocabulary", "Heads", "ResidualHeads"]
