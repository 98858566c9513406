"""Copies of a cache's shards on a local disk, made in the background while the cache is read.

    FOLDER/<16 digits of a cache's fingerprint>.lock            held by the process that copies
    FOLDER/<16 digits of a cache's fingerprint>/shards/...      whole, checked copies, named as in the cache

Only states are read from copies. Token ids, masks, positions and scales, a thousandth of the bytes, stay mapped from
the cache: a map of a copy that is deleted or cut would take the process with it.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from medusa_k25.cache.manifest import sync_folder
from medusa_k25.cache.reader import Cache

BLOCK_BYTES = 2**23
SPARE_SHARE = 0.05  # of the local disk that is left free
STOP_S = 10.0  # to wait for a block: storage that hangs must not keep a run from ending

logger = logging.getLogger(__name__)


def blocks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, piece by piece in one buffer."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # it is the copy that is read from now on


class Stage:
    """Copies shard after shard of `cache` below `folder`, those in `order`; copies of an earlier run are used again.

    All processes of a machine make one, and with it read what is there; one of them, by `start`, copies. The folder
    takes at most `max_bytes`, copies of other caches included, which go first unless a process holds them.
    Reading never waits for a copy, and never depends on one.
    """

    def __init__(self, cache: Cache, folder: Path, max_bytes: float, order: Sequence[int]) -> None:
        if not max_bytes > 0:
            raise ValueError(f"the stage in {folder} may take {max_bytes / 1e9:g} GB, expected more than 0")
        if folder.resolve().is_relative_to(cache.path.resolve()):
            raise ValueError(f"the stage {folder} lies in the cache {cache.path}; choose a folder on a local disk")
        self.cache, self.max_bytes, self.order = cache, max_bytes, order
        self.parent = folder
        self.folder = folder / cache.fingerprint[:16]
        self.refused: list[Path] = []  # shards whose bytes are not those that were written
        self.state = "not copying"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: FileIO | None = None
        self._taken = 0  # bytes below the folder
        self.found = self.staged()
        cache.stage = self.folder

    def staged(self) -> list[int]:
        """The shards that have a copy."""
        return [shard for shard in self.order if self._is_whole(shard)]

    def __str__(self) -> str:
        def size(shards: Sequence[int]) -> str:
            return f"{sum(map(self.cache.shard_bytes, shards)) / 1e9:,.2f} GB"

        staged = self.staged()
        refused = f"; {len(self.refused)} refused: {', '.join(map(str, self.refused))}" if self.refused else ""
        return (
            f"{self.folder}: {len(staged):,} of {len(self.order):,} shards, {size(staged)} of {size(self.order)}, "
            f"{len(self.found):,} of them from an earlier run (at most {self.max_bytes / 1e9:,.2f} GB); "
            f"{self.state}{refused}"
        )

    def start(self) -> None:
        """Copy from now on, in a thread, what has no copy; not if another process copies this cache to here."""
        (self.folder / "shards").mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.folder)
        if self._lock is None:
            self.state = "another run copies"
            return
        self.state = "copying"
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, within a block; what is whole stays for the next run."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        if self._lock is not None:
            self._lock.close()

    def _run(self) -> None:
        try:
            for file in (self.folder / "shards").iterdir():  # of a killed run: only the one that holds the lock writes
                if file.suffix == ".tmp":
                    file.unlink()
            self._taken = sum(map(folder_bytes, (self.folder, *self._others())))
            for shard in self.order:
                if self._is_whole(shard):
                    continue
                if not self._make_room(self.cache.shard_bytes(shard)):
                    self.state = "full"
                    return
                self._copy(shard)
                if self._stopping.is_set():
                    self.state = "stopped"
                    return
            self.state = "done"
        except OSError as error:
            self.state = f"stopped by an error: {error}"
            logger.warning("no further shards are staged in %s: %s", self.folder, error)

    def _path(self, shard: int) -> Path:
        return self.folder / "shards" / self.cache.shard_path(shard).name

    def _is_whole(self, shard: int) -> bool:
        try:
            return self._path(shard).stat().st_size == self.cache.shard_bytes(shard)
        except FileNotFoundError:
            return False

    def _others(self) -> list[Path]:
        """Stages of other caches, of this one before it grew too."""
        return [path for path in sorted(self.parent.iterdir()) if path != self.folder and is_stage(path)]

    def _make_room(self, size: int) -> bool:
        """Whether a file of this size may come, once copies of other caches have gone where it needs their place."""
        while True:
            disk = shutil.disk_usage(self.parent)
            if self._taken + size <= self.max_bytes and disk.free - size >= SPARE_SHARE * disk.total:
                return True
            if not self._delete_another():
                return False

    def _delete_another(self) -> bool:
        """Delete a stage that no process copies to, if there is one."""
        for path in self._others():
            if (lock := locked(path)) is not None:
                with lock:
                    self._taken -= folder_bytes(path)
                    shutil.rmtree(path)
                return True
        return False

    def _copy(self, shard: int) -> None:
        """A copy appears under its name when it is whole, on the disk, and has the bytes that the index promises."""
        source, copy = self.cache.shard_path(shard), self._path(shard)
        temporary = copy.with_suffix(".tmp")
        digest = hashlib.sha256()
        try:
            with temporary.open("wb") as out:
                for block in blocks(source):
                    if self._stopping.is_set():
                        return
                    digest.update(block)
                    out.write(block)
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() == self.cache.shard_sha256(shard):
                temporary.rename(copy)
                sync_folder(copy.parent)
                self._taken += self.cache.shard_bytes(shard)
            else:
                self.refused.append(source)
                logger.warning(
                    "%s is not staged: its sha256 is not that of the index, so the file is damaged, or was "
                    "read wrongly. Check it with `python -m medusa_k25.inspect`",
                    source,
                )
        finally:
            temporary.unlink(missing_ok=True)


def is_stage(path: Path) -> bool:
    """Whether this folder is one that a `Stage` made."""
    return bool(re.fullmatch("[0-9a-f]{16}", path.name)) and (path / "shards").is_dir() and lock_of(path).exists()


def folder_bytes(stage: Path) -> int:
    return sum(file.stat().st_size for file in (stage / "shards").iterdir())


def lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def locked(folder: Path) -> FileIO | None:
    """The open lock of a stage's folder, unless another process holds it; it goes with the process, however it ends."""
    file = lock_of(folder).open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
