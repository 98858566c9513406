"""Is a cache whole? Its documents one by one, and its files.

Letters: T tokens, M rows with a state.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from medusa_k25.cache.manifest import finished_lines, is_sealed
from medusa_k25.cache.shard import Slot, read_header

if TYPE_CHECKING:
    from medusa_k25.cache.reader import Cache, Document

MAX_DOCUMENTS = 256  # read for a sample
MAX_THREADS = 16  # that verify shards side by side
SCAN_BYTES = 2**22  # of a shard that a thread holds: what it hashes is still in its cache when it is looked at
# a number without its sign bit, shifted out to the left: it is finite below this
NOT_FINITE: dict[torch.dtype, np.unsignedinteger[Any]] = {
    torch.float32: np.uint32(0xFF << 24),
    torch.bfloat16: np.uint16(0xFF << 8),
    torch.float8_e4m3fn: np.uint8(0x7F << 1),  # has no infinity, and one NaN
}


def document_fault(
    ids_T: Tensor, mask_T: Tensor, hidden_MD: Tensor, positions_M: Tensor, hidden_size: int, vocab_size: int
) -> str | None:
    """What is wrong with a document (expected, got, fix), or None: `layout_fault`, and every state is finite."""
    fault = layout_fault(ids_T, mask_T, tuple(hidden_MD.shape), positions_M, hidden_size, vocab_size)
    if fault is not None:
        return fault
    # no NaN or Inf is lost in a sum, which takes a thirtieth of the time; only a sum can overflow, too
    rows = (~hidden_MD.sum(dim=1).isfinite()).nonzero().flatten()
    bad = positions_M[rows[~hidden_MD[rows].isfinite().all(dim=1)]]
    if len(bad):
        return f"{len(bad)} states hold NaN or Inf, the first at position {int(bad[0])}; capture it in a wider dtype"
    return None


def layout_fault(
    ids_T: Tensor,
    mask_T: Tensor,
    hidden_shape: tuple[int, ...],
    positions_M: Tensor,
    hidden_size: int,
    vocab_size: int,
) -> str | None:
    """What is wrong with a document but for the values of its states, or None.

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
    if hidden_shape != (M, hidden_size):
        return (
            f"hidden has shape {list(hidden_shape)}, expected {[M, hidden_size]} (a row a position, D of the "
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
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small steps of torch: with threads of its own they wait for each other, on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    """Read everything; yields the faults of one shard after the other (an empty list: it is sound).

    Several shards are read at a time, each once and in blocks, so that memory does not grow.
    """
    documents: dict[int, list[Document]] = {shard: [] for shard in range(cache.num_shards)}
    documents |= {shard: list(some) for shard, some in groupby(cache.documents, key=lambda document: document.shard)}
    pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        yield from pool.map(lambda item: _shard_faults(cache, *item), documents.items())
    finally:
        pool.shutdown(cancel_futures=True)


def _shard_faults(cache: "Cache", shard: int, documents: list["Document"]) -> list[str]:
    path = cache.shard_path(shard)
    try:
        slots = read_header(path, cache.shard_bytes(shard))
    except ValueError as error:  # it was sound when the cache was opened
        return [str(error)]
    digest, finite = scan(path, slots)
    faults = []
    if digest != cache.shard_sha256(shard):
        faults.append(f"{path} has changed since it was written: its sha256 differs")
    for document in documents:
        ids_T, mask_T, positions_M = cache.token_ids(document), cache.loss_mask(document), cache.positions(document)
        sizes = cache.hidden_size, cache.vocab_size
        if finite:
            shape = (document.row_stop - document.row_start, cache.hidden_size)
            fault = layout_fault(ids_T, mask_T, shape, positions_M, *sizes)
        else:  # which of them is not?
            fault = document_fault(ids_T, mask_T, *cache.states(document), *sizes)
        if fault is not None:
            faults.append(f"document {document.id!r}: {fault}")
    return faults


def scan(path: Path, slots: Mapping[str, Slot]) -> tuple[str, bool]:
    """(sha256 of a shard, whether its states are finite), from one pass over the file."""
    digest = hashlib.sha256()
    numbers = [slots[name] for name in ("hidden", "hidden_scales") if name in slots]
    block, shifted = memoryview(bytearray(SCAN_BYTES)), np.empty(SCAN_BYTES, np.uint8)
    finite, offset = True, 0
    with path.open("rb") as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            for slot in numbers:  # both they and the blocks are aligned
                start, stop = max(slot.start - offset, 0), min(slot.stop - offset, count)
                if finite and start < stop:
                    limit = NOT_FINITE[slot.dtype]
                    bits = np.frombuffer(block[start:stop], limit.dtype)
                    out = shifted[: stop - start].view(limit.dtype)
                    finite = bool(np.left_shift(bits, 1, out=out).max() < limit)
            offset += count
    return digest.hexdigest(), finite


def index_faults(cache: "Cache") -> dict[str, list[str]]:
    """Index file -> what is wrong with its end; the lines before it were checked when the cache was opened.

    A last line without a newline is one that its writer did not finish, and counts for nothing; unless it is whole.
    """
    found = {}
    for file in sorted((cache.path / "index").glob("*.jsonl")):
        content = file.read_bytes()
        if is_sealed(content[len(finished_lines(content)) : -1]):
            found[str(file)] = ["the last byte has changed since it was written: expected a newline"]
    return found


def unlisted_files(cache: "Cache") -> list[Path]:
    """Files in shards/ that no index names: a killed writer left them, or a running one has not finished them."""
    listed = {cache.shard_path(shard) for shard in range(cache.num_shards)}
    return sorted(set((cache.path / "shards").iterdir()) - listed)
