"""Is a cache whole? Its documents one by one, and its files.

Letters: T tokens, M rows with a state.
"""

import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from medusa_k25.cache.reader import Cache

MAX_DOCUMENTS = 256  # read for a sample


def document_fault(
    ids_T: Tensor, mask_T: Tensor, hidden_MD: Tensor, positions_M: Tensor, hidden_size: int, vocab_size: int
) -> str | None:
    """What is wrong with a document (expected, got, fix), or None.

    A state may be missing only before an answer's last prompt token and at the document's final token.
    """
    T, M = len(ids_T), len(positions_M)
    if mask_T.shape != (T,) or ids_T.dim() != 1:
        return f"loss mask has shape {list(mask_T.shape)}, token ids {list(ids_T.shape)}; expected one flag a token"
    if T and not (0 <= ids_T.min() and ids_T.max() < vocab_size):
        t = int(((ids_T < 0) | (ids_T >= vocab_size)).nonzero()[0])
        return (
            f"token id {int(ids_T[t])} at position {t}, expected 0 to {vocab_size - 1}; "
            "tokenise with the target's own tokenizer"
        )
    if not mask_T[1:].any():
        return "the loss mask marks no token to predict; mark the answer's tokens, or leave the document out"
    if hidden_MD.shape != (M, hidden_size):
        return (
            f"hidden has shape {list(hidden_MD.shape)}, expected {[M, hidden_size]} (a row a position, D of the "
            "target); states of another length than their tokens come from prefix caching: switch it off"
        )
    if M and not (0 <= positions_M.min() and positions_M.max() < T):
        return f"positions run from {int(positions_M.min())} to {int(positions_M.max())}, expected 0 to {T - 1}"
    if not (positions_M[1:] > positions_M[:-1]).all():
        return "positions are not strictly increasing; sort them, and store a position once"
    stored_T = torch.zeros(T, dtype=torch.bool)
    stored_T[positions_M] = True
    last_answer_token = int(mask_T.nonzero()[-1])
    may_lack_T = torch.arange(T) < last_answer_token
    may_lack_T[:-1] &= ~mask_T[1:]
    may_lack_T[-1] = True
    if not (stored_T | may_lack_T).all():
        lacking = (~(stored_T | may_lack_T)).nonzero().flatten()
        return (
            f"{len(lacking)} positions lack a state, the first is {int(lacking[0])} of {T}; only positions before an "
            "answer's last prompt token and the final one may: capture it again without prefix caching"
        )
    # no NaN or Inf is lost in a sum, which takes a thirtieth of the time; only a sum can overflow, too
    rows = (~hidden_MD.sum(dim=1).isfinite()).nonzero().flatten()
    bad = positions_M[rows[~hidden_MD[rows].isfinite().all(dim=1)]]
    if len(bad):
        return f"{len(bad)} states hold NaN or Inf, the first at position {int(bad[0])}; capture it in a wider dtype"
    return None


def spread(n: int, count: int) -> list[int]:
    """At most `count` of the numbers 0 .. n-1, evenly spread."""
    return torch.linspace(0, n - 1, min(n, count)).round().long().tolist() if n else []


def check_sample(cache: "Cache", max_rows: int = 512) -> None:
    """ValueError if sampled states are not finite, or token ids of sampled documents are out of range. Fast."""
    for index in spread(len(cache.documents), MAX_DOCUMENTS):
        document = cache.documents[index]
        where = f"{cache.path}: document {document.id!r} (shard {document.shard})"
        ids_T = cache.token_ids(document)
        if not (0 <= ids_T.min() and ids_T.max() < cache.vocab_size):
            raise ValueError(
                f"{where} has token ids from {int(ids_T.min())} to {int(ids_T.max())}, expected 0 to "
                f"{cache.vocab_size - 1}; the shard is damaged: remove its line from the index and capture again"
            )
        rows = spread(document.row_stop - document.row_start, 1 + max_rows // min(len(cache.documents), MAX_DOCUMENTS))
        for row in (document.row_start + row for row in rows):
            if not torch.isfinite(cache.read_rows(document.shard, row, row + 1)).all():
                raise ValueError(
                    f"{where} holds NaN or Inf in row {row}; "
                    "the shard is damaged: remove its line from the index and capture again"
                )


def verify(cache: "Cache") -> Iterator[list[str]]:
    """Read everything; yields the faults of one shard after the other (an empty list: it is sound)."""
    seen: set[str] = set()
    for shard, documents in groupby(cache.documents, key=lambda document: document.shard):
        faults = []
        with cache.shard_path(shard).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != cache.shard_sha256(shard):
                faults.append(f"{cache.shard_path(shard)} has changed since it was written: its sha256 differs")
        for document in documents:
            fault = document_fault(
                cache.token_ids(document),
                cache.loss_mask(document),
                *cache.states(document),
                cache.hidden_size,
                cache.vocab_size,
            )
            if fault is None and document.id in seen:
                fault = "stored twice"
            seen.add(document.id)
            if fault is not None:
                faults.append(f"document {document.id!r}: {fault}")
        yield faults
