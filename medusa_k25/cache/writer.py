"""Append documents with their states to a cache."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
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


def quantise(hidden_MD: Tensor) -> tuple[Tensor, Tensor]:
    """States as float8_e4m3fn [M, D] and their scales fp32 [M]: state = fp8 * scale, scale = amax / 448."""
    hidden_MD = hidden_MD.float()
    # the smallest normal number stands in for a zero row's scale: 0 / 0 would be NaN
    scales_M = (hidden_MD.abs().amax(dim=1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (hidden_MD / scales_M[:, None]).to(torch.float8_e4m3fn), scales_M


class CacheWriter:
    """Adds documents to a cache, a shard at a time. One process a writer name; several names may append at once.

    Use it as a context manager: on the way out, also through an error, the documents that were accepted are stored.
    """

    def __init__(self, path: Path, manifest: Manifest, writer: str, shard_tokens: int) -> None:
        self.path = path
        self.manifest = manifest
        self.writer = writer
        self.shard_tokens = shard_tokens
        self._documents: list[dict[str, Any]] = []  # accepted, not yet in a shard
        self._columns: list[dict[str, Tensor]] = []
        # their states, one after the other; used again for every shard: fresh memory costs as much as the disk
        self._hidden_RD = torch.empty(0, manifest.hidden_size, dtype=STORAGE_DTYPES[manifest.storage_dtype])
        self._rows = 0
        self._tokens = 0
        self._interrupted = False  # in the middle of storing a shard
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
        """Accept a document; it is on disk after the next `flush`.

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
        if self._hidden_RD.dtype == torch.float8_e4m3fn:
            hidden_MD, columns["hidden_scales"] = quantise(hidden_MD)
        rows = self._rows + len(hidden_MD)
        if rows > len(self._hidden_RD):
            larger_RD = self._hidden_RD.new_empty(max(rows, self.shard_tokens), self.manifest.hidden_size)
            larger_RD[: self._rows] = self._hidden_RD[: self._rows]
            self._hidden_RD = larger_RD
        self._hidden_RD[self._rows : rows] = hidden_MD
        self._rows = rows
        self.ids.add(id)
        self._documents.append(document)
        self._columns.append(columns)
        self._tokens += len(ids_T)
        if self._tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Store the accepted documents as a shard. OSError if the disk is full; they then stay accepted."""
        if not self._documents:
            return
        self._interrupted = True
        starts = torch.tensor([0] + [document["length"] for document in self._documents]).cumsum(0)
        pieces = {name: [columns[name] for columns in self._columns] for name in self._columns[0]}
        pieces["document_starts"] = [starts[:-1]]
        pieces["hidden"] = [self._hidden_RD[: self._rows]]
        pieces["hidden_positions"] = [p + start for p, start in zip(pieces["hidden_positions"], starts, strict=False)]
        order = ("document_starts", "hidden_positions", "token_ids", "hidden_scales", "hidden", "loss_mask")
        name = f"shards/{self.writer}-{self._next:05d}.safetensors"
        temporary = self.path / f"{name}.tmp"
        listed = os.fstat(self._index.fileno()).st_size
        try:
            size, digest = write_shard(temporary, {column: pieces[column] for column in order if column in pieces})
            temporary.rename(self.path / name)
            sync_folder(self.path / "shards")
            entry = {
                "shard": name,
                "sha256": digest,
                "bytes": size,
                "tokens": self._tokens,
                "states": sum(document["states"] for document in self._documents),
                "documents": self._documents,
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
        self._documents, self._columns = [], []
        self._tokens = self._rows = 0
        self._interrupted = False

    def close(self) -> None:
        """Store what was accepted and give the writer's name free."""
        try:
            self.flush()
        finally:
            self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._interrupted:  # a second try would hide the first error, or store documents twice
            self._index.close()
        else:
            self.close()
