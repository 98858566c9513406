"""Append documents with their states to a cache."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from medusa_k25.cache.check import document_fault
from medusa_k25.cache.manifest import (
    STORAGE_DTYPES,
    Manifest,
    create_manifest,
    finished_lines,
    manifest_digest,
    read_index,
    sealed_line,
    sync_folder,
)
from medusa_k25.cache.shard import as_bytes, write_shard

if TYPE_CHECKING:
    from medusa_k25.target import Target

FP8_MAX = 448.0  # of float8_e4m3fn
FIRST_BYTES = 2**30  # of states of a shard that memory is set aside for; more is when it comes


def quantise(hidden_MD: Tensor) -> tuple[Tensor, Tensor]:
    """States as float8_e4m3fn [M, D] and their scales fp32 [M]: state = fp8 * scale, scale = amax / 448."""
    hidden_MD = hidden_MD.float()
    # the smallest normal number stands in for a zero row's scale: 0 / 0 would be NaN
    scales_M = (hidden_MD.abs().amax(dim=1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (hidden_MD / scales_M[:, None]).to(torch.float8_e4m3fn), scales_M


class Accepted:
    """Documents in memory that will make up a shard.

    Their states lie one after the other in a buffer that is used again: fresh memory costs as much as the disk.
    `capacity` rows are expected; what is not touched takes no memory.
    """

    def __init__(self, hidden_size: int, storage_dtype: torch.dtype, capacity: int) -> None:
        self.documents: list[dict[str, Any]] = []
        self.columns: list[dict[str, Tensor]] = []  # of each document, all but "hidden"
        self.tokens = 0
        self.rows = 0
        self._hidden_RD = torch.empty(capacity, hidden_size, dtype=storage_dtype)

    def take(self, document: dict[str, Any], columns: dict[str, Tensor], hidden_MD: Tensor) -> None:
        if self._hidden_RD.dtype == torch.float8_e4m3fn:
            hidden_MD, columns["hidden_scales"] = quantise(hidden_MD)
        rows = self.rows + len(hidden_MD)
        if rows > len(self._hidden_RD):
            larger_RD = self._hidden_RD.new_empty(max(rows, 2 * len(self._hidden_RD)), self._hidden_RD.shape[1])
            larger_RD[: self.rows] = self._hidden_RD[: self.rows]
            self._hidden_RD = larger_RD
        self._hidden_RD[self.rows : rows] = hidden_MD
        self.rows = rows
        self.documents.append(document)
        self.columns.append(columns)
        self.tokens += document["length"]

    def pieces(self) -> dict[str, list[Tensor]]:
        """The columns of the shard, in its order."""
        starts = torch.tensor([0] + [document["length"] for document in self.documents]).cumsum(0)
        pieces = {name: [columns[name] for columns in self.columns] for name in self.columns[0]}
        pieces["document_starts"] = [starts[:-1]]
        pieces["hidden"] = [self._hidden_RD[: self.rows]]
        pieces["hidden_positions"] = [p + start for p, start in zip(pieces["hidden_positions"], starts, strict=False)]
        order = ("document_starts", "hidden_positions", "token_ids", "hidden_scales", "hidden", "loss_mask")
        return {name: pieces[name] for name in order if name in pieces}

    def clear(self) -> None:
        self.documents, self.columns = [], []
        self.tokens = self.rows = 0


class CacheWriter:
    """Adds documents to a cache, a shard at a time. One process a writer name; several names may append at once.

    Use it as a context manager: on the way out, also through an error, the documents that were accepted are stored.
    A full shard is stored by a thread while documents of the next are accepted, so up to two shards are in memory.
    """

    def __init__(self, path: Path, manifest: Manifest, writer: str, shard_tokens: int) -> None:
        self.path = path
        self.manifest = manifest
        self.writer = writer
        self.shard_tokens = shard_tokens
        storage_dtype = STORAGE_DTYPES[manifest.storage_dtype]
        capacity = min(shard_tokens, FIRST_BYTES // (manifest.hidden_size * storage_dtype.itemsize))
        # the full one is empty once it is stored
        self._open, self._full = (Accepted(manifest.hidden_size, storage_dtype, capacity) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache writer")
        self._storing: Future[None] | None = None  # of the full one
        self._failed = False  # to store it
        self.manifest_sha256 = manifest_digest(path)
        self._index = self._lock_index()
        try:
            # ids of all documents stored or accepted, by any writer: what a resumed capture can skip
            self.ids: set[str] = {
                document["id"]
                for file in sorted((path / "index").glob("*.jsonl"))
                for entry in read_index(file, file.read_bytes())
                for document in entry["documents"]
            }
        except ValueError:
            self._index.close()
            raise
        self._index.seek(0)
        finished = finished_lines(self._index.read())
        self._index.truncate(len(finished))
        # a shard that an earlier run wrote but did not list has this number: it is overwritten
        self._next = finished.count(b"\n")

    @classmethod
    def open(
        cls,
        path: Path | str,
        target: "Target",
        storage_dtype: str,
        engine: str,
        writer: str = "main",
        shard_tokens: int = 32768,
    ) -> Self:
        """Create the cache at `path` or continue it.

        storage_dtype: float32, bfloat16 or float8_e4m3fn. engine: what computes the states, for the record.
        shard_tokens: a shard is written when so many tokens are waiting, in memory, for it.
        ValueError if the cache was made with another target or dtype, or if the writer's name is in use.
        """
        path = Path(path)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", writer):
            raise ValueError(f"writer is {writer!r}, expected a plain file name of letters, digits, '_', '-' and '.'")
        for folder in (path, path / "index", path / "shards"):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(path, create_manifest(path, target, storage_dtype, engine), writer, shard_tokens)

    def _lock_index(self) -> FileIO:
        file = (self.path / "index" / f"{self.writer}.jsonl").open("ab+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"another process is writing to {self.path} as writer {self.writer!r}; "
                "give this one another writer name, or wait for that one"
            ) from None
        sync_folder(self.path / "index")
        return file

    def add(
        self,
        *,
        id: str,
        group: str | None,
        token_ids_T: Tensor,
        loss_mask_T: Tensor,
        hidden_MD: Tensor,
        positions_M: Tensor,
        prompt_length: int,
        finish_reason: str,
        sampling: dict[str, Any],
        dtype: str,
        label: str | None,
        origin: dict[str, Any],
    ) -> None:
        """Accept a document; it is on disk after the next `flush`. OSError as there, for documents before it.

        token_ids_T int [T]; loss_mask_T bool [T], True on answer tokens; hidden_MD float [M, D], the states after the
        final norm at positions_M int [M] of the document; prompt_length tokens before the first answer;
        dtype: of the model that generated the text; origin: what else is known of how it came to be (engine,
        quantisation, thinking, tools, ids: "generated" or "rendered" from text).
        ValueError, naming the document, for anything wrong with it; documents accepted before are not touched.
        """
        if id in self.ids:
            raise ValueError(f"document {id!r} is already in {self.path}; skip the documents in `ids`")
        ids_T = torch.as_tensor(token_ids_T, device="cpu").long()
        mask_T = torch.as_tensor(loss_mask_T, device="cpu").bool()
        positions_M = torch.as_tensor(positions_M, device="cpu").long()
        hidden_MD = hidden_MD.detach().cpu()
        fault = document_fault(
            ids_T, mask_T, hidden_MD, positions_M, self.manifest.hidden_size, self.manifest.vocab_size
        )
        if fault is None and not 0 <= prompt_length <= len(ids_T):
            fault = f"prompt_length is {prompt_length}, expected 0 to {len(ids_T)}, the number of tokens"
        if fault is not None:
            raise ValueError(f"document {id!r}: {fault}")
        # the prompt decides the split of a document without a group; a text without a prompt stands for itself
        prompt_ids = ids_T[:prompt_length] if prompt_length else ids_T
        document = {
            "id": id,
            "group": group,
            "prompt_length": prompt_length,
            "length": len(ids_T),
            "states": len(positions_M),
            "finish_reason": finish_reason,
            "sampling": sampling,
            "dtype": dtype,
            "label": label,
            "origin": origin,
            "hash": hashlib.sha256(as_bytes(prompt_ids.int())).hexdigest(),
        }
        json.dumps(document)  # what cannot be stored must fail here, not take a whole shard with it
        columns = {"token_ids": ids_T.int(), "loss_mask": mask_T.clone(), "hidden_positions": positions_M.clone()}
        self._open.take(document, columns, hidden_MD)
        self.ids.add(id)
        if self._open.tokens >= self.shard_tokens:
            self._finish_full()
            self._store_open()

    def flush(self) -> None:
        """Store the accepted documents as a shard. OSError if the disk is full; they then stay accepted."""
        self._finish_full()
        if self._open.documents:
            self._store_open()
            self._finish_full()

    def _store_open(self) -> None:
        """Begin to store what was accepted; what comes from now on goes into the next shard."""
        self._open, self._full = self._full, self._open
        self._storing = self._thread.submit(self._store, self._full)

    def _finish_full(self) -> None:
        """Wait until the full shard is stored, or try it again if it failed."""
        if self._storing is None and self._full.documents:
            self._storing = self._thread.submit(self._store, self._full)
        if self._storing is not None:
            wait([self._storing])
            stored, self._storing, self._failed = self._storing, None, True
            stored.result()
            self._full.clear()
            self._failed = False

    def _store(self, accepted: Accepted) -> None:
        pieces = accepted.pieces()
        name = f"shards/{self.writer}-{self._next:05d}.safetensors"
        temporary = self.path / f"{name}.tmp"
        listed = os.fstat(self._index.fileno()).st_size
        try:
            size, digest = write_shard(temporary, pieces)
            temporary.rename(self.path / name)
            sync_folder(self.path / "shards")
            entry = {
                "shard": name,
                "sha256": digest,
                "bytes": size,
                "tokens": accepted.tokens,
                "states": accepted.rows,
                "documents": accepted.documents,
                "manifest_sha256": self.manifest_sha256,
            }
            line = sealed_line(entry)
            if self._index.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._index.fileno())
        except OSError as error:
            self._index.truncate(listed)
            temporary.unlink(missing_ok=True)
            (self.path / name).unlink(missing_ok=True)
            size = sum(piece.nbytes for column in pieces.values() for piece in column)
            free = shutil.disk_usage(self.path).free
            raise OSError(
                error.errno,
                f"cannot store {name} ({size / 1e6:,.1f} MB) in {self.path}: {error.strerror}, {free / 1e6:,.1f} MB "
                f"are free there. The {self._next} shards before it are safe; free at least {size / 1e6:,.1f} MB a "
                "shard that is to come, or move the whole folder to a larger disk, and run the same command again: it "
                "continues after them",
            ) from error
        self._next += 1

    def close(self) -> None:
        """Store what was accepted and give the writer's name free."""
        try:
            self.flush()
        finally:
            self._end()

    def _end(self) -> None:
        self._thread.shutdown()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._failed:  # a second try would hide the first error
            self._end()
        else:
            self.close()
