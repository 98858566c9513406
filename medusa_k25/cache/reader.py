"""Read a cache of states; nothing is loaded before it is asked for.

Letters: T tokens of a document, N tokens of a shard, M rows with a state, D hidden.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from medusa_k25.cache.alignment import self_check
from medusa_k25.cache.check import check_sample
from medusa_k25.cache.manifest import STORAGE_DTYPES, Manifest, finished_lines, read_index
from medusa_k25.cache.shard import Slot, as_bytes, map_tensors, read_header
from medusa_k25.target import IN_A_CACHE, Target, refuse_other_target


@dataclass(frozen=True)
class Document:
    id: str
    group: str | None
    prompt_length: int
    length: int  # tokens
    finish_reason: str
    sampling: dict[str, Any]
    dtype: str  # of the model that generated the text
    label: str | None
    origin: dict[str, Any]  # engine, quantisation, thinking, tools, ids of the text, as far as they are known
    hash: str  # of the prompt's token ids
    shard: int
    start: int  # first token, in the shard's tokens
    row_start: int  # its rows of the shard's `hidden`
    row_stop: int


class Cache:
    """A snapshot of the shards that were finished when it was opened; open again to see more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        self.hidden_size = self.manifest.hidden_size
        self.vocab_size = self.manifest.vocab_size
        self.storage_dtype = STORAGE_DTYPES[self.manifest.storage_dtype]
        self.documents: list[Document] = []
        self.repeated: list[str] = []  # ids that came before: two writers stored them at once, the first copy counts
        seen: set[str] = set()
        self._shards: list[dict[str, Any]] = []  # without "documents"
        self._slots: list[dict[str, Slot]] = []
        self._mapped: dict[int, dict[str, Tensor]] = {}
        self.stage: Path | None = (
            None  # a folder with copies of shards, see `staging`: states are read there if they can
        )
        self._staged: set[int] = set()  # shards whose copy was found there
        digest = hashlib.sha256((path / "manifest.json").read_bytes())
        for file in sorted((path / "index").glob("*.jsonl")):
            content = file.read_bytes()
            digest.update(finished_lines(content))
            for number, entry in enumerate(read_index(file, content), start=1):
                try:
                    self._add_shard(entry, seen)
                except (KeyError, TypeError) as error:
                    raise ValueError(
                        f"{file} line {number} does not describe a shard ({error!r}); "
                        "restore the file, or remove the line to lose that shard"
                    ) from None
        self.fingerprint = digest.hexdigest()  # identifies the content: the index holds a sha256 a shard
        self.num_tokens = sum(shard["tokens"] for shard in self._shards)
        self.num_states = sum(shard["states"] for shard in self._shards)

    @classmethod
    def open(
        cls, path: Path | str, target: Target | None = None, check: bool = True, allow_target_mismatch: bool = False
    ) -> Self:
        """Open the cache at `path`; all shards are looked at, few bytes are read.

        target: the target to use it with; sizes and identity must be those of the cache, or the sizes alone with
        allow_target_mismatch, which warns of the rest.
        check: look at sampled states and ids; with a target, also that states and tokens are aligned (`self_check`).
        ValueError if anything is missing, truncated, damaged, or does not belong to the target.
        """
        cache = cls(Path(path))
        if target is not None:
            cache._match(target, allow_target_mismatch)
        if check:
            check_sample(cache)
            if target is not None:
                self_check(cache, target)
        return cache

    def _add_shard(self, entry: dict[str, Any], seen: set[str]) -> None:
        shard = len(self._shards)
        documents = entry.pop("documents")
        self._shards.append(entry)
        slots = read_header(self.shard_path(shard), entry["bytes"])
        self._slots.append(slots)
        start, row = 0, 0
        starts = []
        for facts in documents:
            states = facts.pop("states")
            document = Document(**facts, shard=shard, start=start, row_start=row, row_stop=row + states)
            if document.id in seen:
                self.repeated.append(document.id)
            else:
                self.documents.append(document)
                seen.add(document.id)
            starts.append(start)
            start, row = start + facts["length"], row + states
        N, M = entry["tokens"], entry["states"]
        expected = {
            "document_starts": (torch.int64, (len(documents),)),
            "hidden_positions": (torch.int64, (M,)),
            "token_ids": (torch.int32, (N,)),
            "loss_mask": (torch.bool, (N,)),
            "hidden": (self.storage_dtype, (M, self.hidden_size)),
        }
        if self.storage_dtype == torch.float8_e4m3fn:
            expected["hidden_scales"] = (torch.float32, (M,))
        found = {name: (slot.dtype, slot.shape) for name, slot in slots.items()}
        if found != expected or (start, row) != (N, M) or self._map(shard)["document_starts"].tolist() != starts:
            differing = {k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k)}
            raise ValueError(
                f"shard {self.shard_path(shard)} disagrees with its line in the index about "
                f"{', '.join(sorted(differing)) or 'its documents'}: expected "
                f"{ {k: expected.get(k) for k in differing} or starts }, got { {k: found.get(k) for k in differing} }; "
                "restore the file, or remove its line from the index and capture again"
            )

    def _match(self, target: Target, allow_mismatch: bool) -> None:
        facts, where = self.manifest.target, f"cache {self.path}"
        wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        if differences := [f"{key} {facts[key]} != {value}" for key, value in wanted.items() if facts[key] != value]:
            raise ValueError(
                f"{where} was made for target {facts['name']} ({facts['revision']}), which differs from target "
                f"{target.name} ({target.revision}) in: {'; '.join(differences)}; pick the target that the cache was "
                "made with, or capture again"
            )
        refuse_other_target(where, facts, target, allow_mismatch, IN_A_CACHE)

    def refuse_other(self, fingerprint: str, what: str) -> None:
        """ValueError unless `what` was derived from this cache as it is: `fingerprint` is that of the cache it knows.

        A draft vocabulary and a tree are chosen on a cache's training and calibration text; on another cache that text
        may be the one that is reported on.
        """
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{what} comes from another cache ({fingerprint[:16]}) than {self.path} is now ({self.fingerprint[:16]}"
                "; it has grown, or is another): name the cache it was made from, train anew, or set "
                "allow_other_cache=true if none of this held-out text was trained on"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}  # another process maps the files itself

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def shard_path(self, shard: int) -> Path:
        return self.path / self._shards[shard]["shard"]

    def shard_sha256(self, shard: int) -> str:
        return self._shards[shard]["sha256"]

    def shard_bytes(self, shard: int) -> int:
        return self._shards[shard]["bytes"]

    def _map(self, shard: int) -> dict[str, Tensor]:
        if shard not in self._mapped:
            self._mapped[shard] = map_tensors(self.shard_path(shard), self._slots[shard])
        return self._mapped[shard]

    def shard_token_ids(self, shard: int) -> Tensor:
        """int32 [N], a view of the memory map."""
        return self._map(shard)["token_ids"]

    def shard_loss_mask(self, shard: int) -> Tensor:
        """bool [N], True on answer tokens; a view of the memory map."""
        return self._map(shard)["loss_mask"]

    def shard_positions(self, shard: int) -> Tensor:
        """int64 [M], the token of the shard that each row of states has read; a view of the memory map."""
        return self._map(shard)["hidden_positions"]

    def token_ids(self, document: Document) -> Tensor:
        """int32 [T]"""
        return self.shard_token_ids(document.shard)[document.start : document.start + document.length]

    def loss_mask(self, document: Document) -> Tensor:
        """bool [T]"""
        return self.shard_loss_mask(document.shard)[document.start : document.start + document.length]

    def positions(self, document: Document) -> Tensor:
        """int64 [M], the positions in the document that have a state."""
        return self.shard_positions(document.shard)[document.row_start : document.row_stop] - document.start

    def states(self, document: Document) -> tuple[Tensor, Tensor]:
        """The document's states [M, D], bf16 if stored so, else fp32, and their positions int64 [M] in it."""
        return self.read_rows(document.shard, document.row_start, document.row_stop), self.positions(document)

    def read_rows(self, shard: int, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows start .. stop-1 of a shard's states, [stop - start, D].

        Copied into `out` if given, in its dtype, else into a new tensor: bf16 if stored so, else fp32. A contiguous
        `out` of the stored dtype that is used again and again is fastest: the bytes go from the page cache to it.
        """
        slots = self._slots[shard]
        if not 0 <= start <= stop <= slots["hidden"].shape[0]:
            raise ValueError(f"rows {start} to {stop} of shard {shard}, which has {slots['hidden'].shape[0]} rows")
        if out is None:
            fp8 = self.storage_dtype == torch.float8_e4m3fn
            out = torch.empty(stop - start, self.hidden_size, dtype=torch.float32 if fp8 else self.storage_dtype)
        elif out.shape != (stop - start, self.hidden_size):
            raise ValueError(f"out has shape {list(out.shape)}, expected {[stop - start, self.hidden_size]}")
        if out.dtype == self.storage_dtype and out.is_contiguous() and out.device.type == "cpu":
            self._read_into(out, shard, start)
            return out
        stored = torch.empty(out.shape, dtype=self.storage_dtype)
        self._read_into(stored, shard, start)
        if "hidden_scales" in slots:
            return out.copy_(stored.float().mul_(self._map(shard)["hidden_scales"][start:stop, None]))
        return out.copy_(stored)

    def _read_into(self, out: Tensor, shard: int, start: int) -> None:
        """Fill a contiguous tensor of the stored dtype with rows from `start` on.

        Reads rather than copies from a memory map: no page faults, and the process's memory does not grow.
        """
        buffer = as_bytes(out)
        offset = self._slots[shard]["hidden"].start + start * self.hidden_size * self.storage_dtype.itemsize
        if (copy := self._copy(shard)) is not None:
            try:
                read_fully(str(copy), buffer, offset)
                return
            except (OSError, EOFError):  # a copy may go at any time: whoever needs the disk may delete it
                self._staged.discard(shard)
        try:
            read_fully(f"{self.path}/{self._shards[shard]['shard']}", buffer, offset)
        except EOFError:
            raise ValueError(
                f"shard {self.shard_path(shard)} has become shorter than its index says: truncated?; "
                "restore the file, or remove its line from the index and capture again"
            ) from None

    def _copy(self, shard: int) -> Path | None:
        """The staged copy of a shard if there is a whole one. Whether one has appeared is looked up at every read."""
        if self.stage is None:
            return None
        copy = self.stage / self._shards[shard]["shard"]
        if shard not in self._staged:
            try:
                if copy.stat().st_size != self.shard_bytes(shard):
                    return None
            except OSError:
                return None
            self._staged.add(shard)
        return copy


def read_fully(path: str, buffer: memoryview, offset: int) -> None:
    """Fill the buffer with the file's bytes from `offset` on; EOFError if it ends before.

    Plain system calls: a window of a megabyte takes a tenth of a millisecond, and a file object a fifth of that.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while buffer:
            count = os.preadv(descriptor, [buffer], offset)
            if count == 0:
                raise EOFError
            buffer, offset = buffer[count:], offset + count
    finally:
        os.close(descriptor)
