"""The facts of a cache that never change (`manifest.json`), and the index of its finished shards.

A cache is a folder:

    manifest.json                    written once, by whoever comes first
    index/<writer>.jsonl             append-only, a line a finished shard
    shards/<writer>-00000.safetensors

A line of an index counts when it ends with a newline: a torn last line is a shard that was not finished, and a shard
without a line is garbage that its writer overwrites. So a cache is readable at any moment, also after a kill.

Every byte is covered by a sha256: a shard's by its line in the index, manifest.json by each of these lines, and a line
by its own end. notes/cache_format.md describes the format for others who write it.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from medusa_k25.target import IN_A_CACHE, Target, target_differences

FORMAT_VERSION = 1
STORAGE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,  # with one fp32 scale a token
}


@dataclass(frozen=True)
class Manifest:
    target: dict[str, Any]
    storage_dtype: str
    engine: str
    created: str
    final_norm_applied: bool = True
    format_version: int = FORMAT_VERSION

    @property
    def hidden_size(self) -> int:
        return int(self.target["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.target["vocab_size"])

    @staticmethod
    def read(path: Path) -> "Manifest":
        """The manifest of the cache at `path`; ValueError if there is none or if this version cannot read it."""
        try:
            facts = json.loads((path / "manifest.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{path} is not a cache: it has no manifest.json; "
                "make one with `python -m medusa_k25.capture`, or correct the path"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"{path}/manifest.json is not JSON ({error}); restore the file, or capture again"
            ) from None
        if not isinstance(facts, dict) or facts.get("format_version") != FORMAT_VERSION:
            version = facts.get("format_version") if isinstance(facts, dict) else None
            raise ValueError(
                f"{path} has cache format version {version!r}, this code reads version {FORMAT_VERSION}; "
                "use the medusa_k25 that wrote it, or capture again"
            )
        try:
            manifest = Manifest(**facts)
            lacking = {"name", "revision", "hidden_size", "vocab_size", "fingerprints"} - manifest.target.keys()
            lacking |= {"lm_head", "final_norm", "tokenizer"} - manifest.target.get("fingerprints", {}).keys()
            if lacking or manifest.storage_dtype not in STORAGE_DTYPES:
                raise TypeError(f"target lacks {sorted(lacking)}, storage_dtype is {manifest.storage_dtype!r}")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{path}/manifest.json: {error}; restore the file, or capture again") from None
        if not manifest.final_norm_applied:
            raise ValueError(
                f"{path} holds states from before the final norm, expected states after it; "
                "apply the norm when the states are imported"
            )
        return manifest


def create_manifest(path: Path, target: Target, storage_dtype: str, engine: str) -> Manifest:
    """The manifest of the cache at `path`, created if there is none; ValueError if it has another target or dtype."""
    if storage_dtype not in STORAGE_DTYPES:
        raise ValueError(f"storage_dtype is {storage_dtype!r}, expected one of {', '.join(STORAGE_DTYPES)}")
    wanted = Manifest(
        target={
            **target.identity,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        },
        storage_dtype=storage_dtype,
        engine=engine,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    file = path / "manifest.json"
    if not file.exists():
        temporary = path / f"manifest.json.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as out:
                out.write(json.dumps(asdict(wanted), indent=2).encode() + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.link(temporary, file)  # unlike a rename, fails if another writer was first
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path)
    found = Manifest.read(path)
    differences = [
        f"{key}: cache {found.target.get(key)!r}, target {value!r}"
        for key, value in wanted.target.items()
        if key in ("name", "hidden_size", "vocab_size") and found.target.get(key) != value
    ]
    differences += target_differences(found.target, target.identity, IN_A_CACHE)
    if found.storage_dtype != storage_dtype:
        differences.append(f"storage_dtype: cache {found.storage_dtype!r}, asked for {storage_dtype!r}")
    if differences:
        raise ValueError(
            f"cannot append to {path}: it was made otherwise ({'; '.join(differences)}); "
            "capture into another folder, or use the target and dtype that its manifest.json names"
        )
    return found


def sync_folder(path: Path) -> None:
    """Make names created or renamed in the folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finished_lines(content: bytes) -> bytes:
    """An index file's content without a torn last line."""
    return content[: content.rfind(b"\n") + 1]


SEAL = b', "line_sha256": "'


def manifest_digest(path: Path) -> str:
    """sha256 of the bytes of the cache's manifest.json."""
    return hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()


def sealed_line(entry: Mapping[str, Any]) -> bytes:
    """A line of an index: the entry as JSON, with the sha256 of all that comes before it as its last key."""
    text = json.dumps(entry).encode().removesuffix(b"}")
    return text + SEAL + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def is_sealed(line: bytes) -> bool:
    """Whether a line, without its newline, is as `sealed_line` made it."""
    text, _, seal = line.rpartition(SEAL)
    return seal == hashlib.sha256(text).hexdigest().encode() + b'"}'


def read_index(file: Path, content: bytes) -> list[dict[str, Any]]:
    """The entries of the finished shards in the content of an index file, oldest first.

    ValueError names a line that is not as it was written, or that belongs to another manifest.json than the one there.
    """
    entries = []
    digest = manifest_digest(file.parent.parent)
    for number, line in enumerate(finished_lines(content).split(b"\n")[:-1], start=1):
        if not is_sealed(line):
            raise ValueError(
                f"{file} line {number} is damaged: its checksum differs; restore the file, or remove the line to lose "
                "that shard and capture its documents again"
            )
        entry = json.loads(line)
        if entry.get("manifest_sha256") != digest:
            raise ValueError(
                f"{file.parent.parent}/manifest.json is not the one that {file} line {number} was written under: it "
                "has changed since; restore it, or capture again"
            )
        entries.append(entry)
    return entries
