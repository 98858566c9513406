"""What a recording server keeps of its requests, and the thread that writes it; nothing here knows the engine.

A request's states come in pieces: chunks of its prefill, one row a decode step, the accepted rows of a verify pass, and
after a retraction the same positions once more. `Request` keeps each wanted position once; `Recorder` bounds the memory
of all of them, and hands finished documents to a thread that writes them as a cache.

Letters: T tokens of a document, M rows with a state, D hidden.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch
from torch import Tensor

from medusa_k25.cache.manifest import STORAGE_DTYPES
from medusa_k25.cache.writer import CacheWriter

logger = logging.getLogger(__name__)

MAX_TEXT = 1024  # characters of a mark's id, group, label, ...: they are stored a document
MEMORY_FULL = "memory full"  # the client that replays knows this reason: it sends the document again
RETRY_S = 5.0  # after a full disk
LOG_S = 10.0


@dataclass(frozen=True)
class Settings:
    folder: Path
    everything: bool
    storage: str
    storage_dtype: str | None
    memory: int  # bytes

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Settings":
        """Of the variables that `record` lists. ValueError names one that cannot be meant."""

        def value(name: str, default: str, *allowed: str) -> str:
            found = environment.get(f"MEDUSA_K25_RECORD_{name}", default)
            if allowed and found not in allowed:
                raise ValueError(f"MEDUSA_K25_RECORD_{name} is {found!r}, expected one of {', '.join(allowed)}")
            return found

        try:
            memory = int(float(value("GB", "8")) * 1e9)
        except (ValueError, OverflowError):
            memory = 0
        if memory <= 0:
            raise ValueError(f"MEDUSA_K25_RECORD_GB is {value('GB', '8')!r}, expected a number of gigabytes above 0")
        return cls(
            folder=Path(environment["MEDUSA_K25_RECORD"]).expanduser().absolute(),
            everything=value("ALL", "0", "0", "1") == "1",
            storage=value("STORAGE", "answers", "answers", "all"),
            storage_dtype=value("DTYPE", "", "", *STORAGE_DTYPES) or None,
            memory=memory,
        )


@dataclass(frozen=True)
class Mark:
    """What a request says about the document that it becomes; None: the server knows it from the request itself.

    prompt_length: the answer begins here, inside the request's own tokens: a conversation that is replayed. Its
    document ends with the request's tokens, and what the server generates after them is left out.
    """

    id: str | None = None
    group: str | None = None
    prompt_length: int | None = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    dtype: str | None = None
    label: str | None = None
    origin: dict[str, Any] | None = None

    @classmethod
    def parse(cls, value: object) -> Self:
        """A mark as requests carry it: true, or an object of these fields with `sampling` and `origin` as JSON texts
        (an engine's custom parameters nest only once). ValueError names what is wrong with it."""
        if value is True:
            return cls()
        if not isinstance(value, dict):
            raise ValueError(f"expected true or an object, got {type(value).__name__}")
        facts = {key: fact for key, fact in value.items() if fact is not None}
        if unknown := sorted(map(str, facts.keys() - cls.__dataclass_fields__.keys())):
            raise ValueError(
                f"unknown: {', '.join(unknown)[:MAX_TEXT]}; expected {', '.join(cls.__dataclass_fields__)}"
            )
        for key, fact in facts.items():
            if key == "prompt_length":
                fits, expected = type(fact) is int, "a whole number"
            else:
                fits, expected = (
                    isinstance(fact, str) and 0 < len(fact) <= MAX_TEXT,
                    f"text of 1 to {MAX_TEXT} characters",
                )
            if not fits:
                raise ValueError(f"{key}: expected {expected}")
        for key in facts.keys() & {"sampling", "origin"}:
            try:
                facts[key] = json.loads(facts[key])
            except (ValueError, RecursionError):
                facts[key] = None
            if not isinstance(facts[key], dict):
                raise ValueError(f"{key}: expected an object as JSON text")
        return cls(**facts)


@dataclass
class Request:
    """The states of one request, by position in its tokens; wanted are `first` to `stop` - 1, each is kept once."""

    mark: Mark
    id: str
    first: int
    stop: int | None  # None: all that come
    held: list[tuple[int, int]] = field(default_factory=list)  # sorted, disjoint, not touching: start, stop
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)  # first position, rows [m, D]
    bytes: int = 0
    done: bool = False  # finished or dropped

    def wanted(self, start: int, stop: int) -> tuple[int, int]:
        """The part of positions start .. stop-1 that is wanted, held or not; empty: start == stop."""
        start = max(start, self.first)
        stop = stop if self.stop is None else min(stop, self.stop)
        return start, max(start, stop)

    def keep(self, start: int, rows_MD: Tensor) -> int:
        """Copy the rows of positions start .. start+M-1 that are wanted and not held; returns the bytes it took."""
        gaps = []
        low, high = self.wanted(start, start + len(rows_MD))
        for held_start, held_stop in self.held:
            if low < min(held_start, high):
                gaps.append((low, min(held_start, high)))
            low = max(low, held_stop)
        if low < high:
            gaps.append((low, high))
        for low, high in gaps:
            self.pieces.append((low, rows_MD[low - start : high - start].clone()))
        merged: list[tuple[int, int]] = []
        for low, high in sorted(self.held + gaps):
            if merged and merged[-1][1] == low:
                low = merged.pop()[0]
            merged.append((low, high))
        self.held = merged
        taken = sum(high - low for low, high in gaps) * (rows_MD.nbytes // max(len(rows_MD), 1))
        self.bytes += taken
        return taken

    def lacks(self, start: int, stop: int) -> bool:
        """Whether any of positions start .. stop-1 is not held."""
        return start < stop and not any(low <= start and stop <= high for low, high in self.held)

    def states(self, stop: int) -> tuple[Tensor, Tensor]:
        """(hidden [M, D], positions int64 [M], ascending) of all that is held before `stop`."""
        pieces = [
            (start, rows_MD[: stop - start]) for start, rows_MD in sorted(self.pieces, key=lambda piece: piece[0])
        ]
        pieces = [(start, rows_MD) for start, rows_MD in pieces if start < stop]
        positions_M = torch.cat([torch.arange(start, start + len(rows_MD)) for start, rows_MD in pieces])
        return torch.cat([rows_MD for _, rows_MD in pieces]), positions_M


class Recorder:
    """Collects the states of marked requests and stores each finished one as a document, in a thread of its own.

    The caller is never made to wait: when `memory` bytes of states are in memory (of running requests, and of
    documents that the disk has not taken yet), the request that needs more is dropped whole, counted and logged.
    storage: "answers" (from an answer's last prompt token to its last token but one) or "all".
    shard_tokens: a shard is written when so many tokens came, and of whatever is there after `idle_s` without any.
    """

    def __init__(
        self, writer: CacheWriter, dtype: str, storage: str, memory: int, shard_tokens: int, idle_s: float = 1.0
    ) -> None:
        self.writer = writer
        self.dtype = dtype  # of the model, for documents that it generates here
        self.storage = storage
        self.memory = memory
        self.shard_tokens = shard_tokens
        self.idle_s = idle_s
        self.dropped: Counter[str] = Counter()
        self.known = 0
        self.stored = 0
        self.stored_bytes = 0
        self.busy_s = 0.0  # spent storing
        self._running = 0
        self._used = 0
        self._waiting = 0  # finished documents that are not on disk
        self._unstored: list[int] = []  # bytes of each document that the writer has accepted since its last shard
        self._unstored_tokens = 0
        self._retry_at = 0.0
        self._logged = ("", 0.0)
        # reentrant: the garbage collector may drop a request in the middle of anything
        self._lock = threading.RLock()
        self._queue: SimpleQueue[tuple[Request, dict[str, Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="medusa_k25 recorder", daemon=True)
        self._thread.start()

    def begin(self, mark: Mark, id: str, length: int) -> Request | None:
        """Start to keep the states of a request of `length` tokens; None, and counted, where that is of no use."""
        if id in self.writer.ids:
            with self._lock:
                self.known += 1
            return None
        if not self._thread.is_alive():
            self.count("the writing thread has failed", id)
            return None
        if mark.prompt_length is not None and not 0 < mark.prompt_length <= length - 2:
            self.count("answer shorter than two tokens" if mark.prompt_length > 0 else "unreadable mark", id)
            return None
        prompt_length = length if mark.prompt_length is None else mark.prompt_length
        with self._lock:
            self._running += 1
        return Request(
            mark,
            id,
            first=0 if self.storage == "all" else prompt_length - 1,
            stop=None if mark.prompt_length is None else length - 1,
        )

    def keep(self, request: Request, start: int, rows_MD: Tensor) -> None:
        """States of positions start .. start+M-1; the rows are copied."""
        if request.done:
            return
        low, high = request.wanted(start, start + len(rows_MD))
        if self._used + (high - low) * rows_MD[:1].nbytes > self.memory:
            self.drop(request, MEMORY_FULL)
            return
        taken = request.keep(start, rows_MD)
        with self._lock:
            self._used += taken

    def drop(self, request: Request, reason: str) -> None:
        if request.done:
            return
        request.done = True
        with self._lock:
            self._running -= 1
            self._used -= request.bytes
        request.pieces = []
        self.count(reason, request.id)

    def count(self, reason: str, id: str) -> None:
        with self._lock:
            self.dropped[reason] += 1
            count = self.dropped[reason]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a log is no place for each of many
            logger.warning("not recorded: request %r: %s (%d so far)", id, reason, count)

    def finish(
        self,
        request: Request,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        finish_reason: str,
        sampling: dict[str, Any],
    ) -> None:
        """The request's text is final: store it as a document, or drop it where that would not be one.

        prompt_ids, output_ids: as the server saw them; finish_reason and sampling: its own, where the mark says none.
        """
        if request.done:
            return
        mark = request.mark
        ids = list(prompt_ids)
        prompt_length = mark.prompt_length
        if prompt_length is None:
            prompt_length, ids = len(ids), ids + list(output_ids)
        if len(ids) - prompt_length < 2:
            self.drop(request, "answer shorter than two tokens")
        elif request.lacks(prompt_length - 1, len(ids) - 1):
            self.drop(request, "states missing: a cached prefix reached into the answer")
        else:
            manifest = self.writer.manifest
            quantisation = manifest.target["quantisation"]
            generated_here = {"engine": manifest.engine, "quantisation": quantisation, "ids": "generated"}
            facts = {
                "id": request.id,
                "group": mark.group,
                "token_ids_T": torch.tensor(ids),
                "loss_mask_T": torch.arange(len(ids)) >= prompt_length,
                "prompt_length": prompt_length,
                "finish_reason": mark.finish_reason or finish_reason,
                "sampling": sampling if mark.sampling is None else mark.sampling,
                "dtype": mark.dtype or self.dtype,
                "label": mark.label,
                "origin": generated_here if mark.origin is None else mark.origin,
            }
            request.done = True
            with self._lock:
                self._running -= 1
                self._waiting += 1
            self._queue.put((request, facts))

    def status(self) -> dict[str, Any]:
        """Counts since the start, what is in memory now, and the cache it goes to; JSON."""
        manifest = self.writer.manifest
        with self._lock:
            return {
                "folder": str(self.writer.path.absolute()),
                "manifest_sha256": self.writer.manifest_sha256,
                "target": manifest.target,
                "storage": self.storage,
                "storage_dtype": manifest.storage_dtype,
                "state_itemsize": STORAGE_DTYPES[manifest.storage_dtype].itemsize,
                "stored": self.stored,
                "known": self.known,
                "dropped": dict(self.dropped),
                "running": self._running,
                "waiting": self._waiting,
                "memory_used": self._used,
                "memory": self.memory,
                "stored_bytes": self.stored_bytes,
                "mb_per_s": round(self.stored_bytes / 1e6 / self.busy_s, 1) if self.busy_s else 0.0,
            }

    def close(self, timeout: float | None = None) -> None:
        """Store what is finished and end the thread; what is still running is lost."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self.idle_s)
            except Empty:
                self._flush()
                self._log()
                continue
            if item is None:
                break
            self._store(*item)
            if self._unstored_tokens >= self.shard_tokens:
                self._flush()
                self._log()
        self._retry_at = 0.0
        self._flush()
        self._log(at_once=True)
        if not self._waiting:
            self.writer.close()

    def _store(self, request: Request, facts: dict[str, Any]) -> None:
        size, request.bytes = request.bytes, 0
        try:
            if request.id in self.writer.ids:  # the same request twice at a time
                with self._lock:
                    self.known += 1
            else:
                hidden_MD, positions_M = request.states(len(facts["token_ids_T"]) - 1)
                request.pieces = []
                self.writer.add(hidden_MD=hidden_MD, positions_M=positions_M, **facts)
                self._unstored.append(size)
                self._unstored_tokens += len(facts["token_ids_T"])
                return
        except ValueError as error:  # not a document, such as one with NaN; says which
            logger.warning("%s", error)
            self.count("refused by the cache", request.id)
        with self._lock:
            self._waiting -= 1
            self._used -= size

    def _flush(self) -> None:
        if not self._unstored or time.monotonic() < self._retry_at:
            return
        started = time.monotonic()
        try:
            self.writer.flush()
        except OSError as error:  # the documents stay with the writer
            self._retry_at = started + RETRY_S
            logger.error("%s; trying again every %.0f s", error, RETRY_S)
            return
        with self._lock:
            self.busy_s += time.monotonic() - started
            self.stored += len(self._unstored)
            self.stored_bytes += sum(self._unstored)
            self._waiting -= len(self._unstored)
            self._used -= sum(self._unstored)
        self._unstored, self._unstored_tokens = [], 0

    def _log(self, at_once: bool = False) -> None:
        now = self.status()
        line = (
            f"recorded {now['stored']} documents, {now['stored_bytes'] / 1e6:,.1f} MB at {now['mb_per_s']} MB/s; "
            f"{now['known']} were stored before, dropped: {now['dropped'] or 'none'}; in memory: {now['running']} "
            f"running, {now['waiting']} waiting, {now['memory_used'] / 1e6:,.1f} of {now['memory'] / 1e6:,.0f} MB"
        )
        said, when = self._logged
        if line != said and (at_once or time.monotonic() - when > LOG_S):
            self._logged = (line, time.monotonic())
            logger.info("%s", line)
