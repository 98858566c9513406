"""States on disk: written once by `CacheWriter`, read by `Cache` (format version 1)."""

from medusa_k25.cache.alignment import SelfCheck, self_check
from medusa_k25.cache.check import verify
from medusa_k25.cache.manifest import FORMAT_VERSION, STORAGE_DTYPES, Manifest
from medusa_k25.cache.reader import Cache, Document
from medusa_k25.cache.writer import CacheWriter

__all__ = [
    "FORMAT_VERSION",
    "STORAGE_DTYPES",
    "Cache",
    "CacheWriter",
    "Document",
    "Manifest",
    "SelfCheck",
    "self_check",
    "verify",
]
