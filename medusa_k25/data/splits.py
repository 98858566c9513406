"""Which split a document belongs to: decided by a hash, so that it never changes and no list has to be kept."""

import hashlib
from typing import Literal, get_args

Split = Literal["train", "calibration", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)

HELDOUT_SHARE = 0.12
CALIBRATION_SHARE = 0.12


def split_of(group: str | None, key: str) -> Split:
    """The split of a document: by its `group` when it has one (all prompts of a topic stay together), else by `key`.

    `key` is the hash of the document's prompt: two copies of one conversation never straddle the split.
    Calibration text chooses trees and the best checkpoint; held-out text is only reported.
    """
    digest = hashlib.sha256(f"split:{key if group is None else group}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < HELDOUT_SHARE:
        return "heldout"
    return "calibration" if share < HELDOUT_SHARE + CALIBRATION_SHARE else "train"


def share_of(key: str) -> float:
    """Where the hash of a prompt lies in [0, 1), whatever its split: those below a share are that share of them."""
    return int.from_bytes(hashlib.sha256(f"share:{key}".encode()).digest()[:8], "big") / 2**64
