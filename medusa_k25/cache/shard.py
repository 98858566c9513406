"""A shard on disk: a safetensors file, i.e. eight bytes of header length, a JSON header, and the tensors' bytes.

Written and parsed here, not by the safetensors package, because states must go to disk without being concatenated in
memory first, be fsynced, fail with an OSError on a full disk, and be read with pread from a known offset.
The package reads these files too.
"""

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
BLOCK_BYTES = 2**20  # written while they are still in the CPU's cache from hashing: twice as fast as all at once
WRITE_BACK_BYTES = 2**24
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; writing to it writes to the tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_shard(path: Path, columns: dict[str, list[Tensor]]) -> tuple[int, str]:
    """Write and fsync a file with one tensor a column: its pieces, one after the other along dimension 0.

    Columns with wide elements come first, so that every tensor is aligned.
    Returns (bytes written, sha256 of the file).
    """
    header, offset = {}, 0
    for name, pieces in columns.items():
        stop = offset + sum(piece.nbytes for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        header[name] = {"dtype": DTYPE_NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    parts += [as_bytes(piece) for pieces in columns.values() for piece in pieces]
    digest = hashlib.sha256()
    begun = written = 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), BLOCK_BYTES):
                block = part[start : start + BLOCK_BYTES]
                digest.update(block)
                if file.write(block) != len(block):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += len(block)
                if written - begun >= WRITE_BACK_BYTES:  # the disk begins now, not when it is told to sync
                    os.posix_fadvise(file.fileno(), begun, written - begun, os.POSIX_FADV_DONTNEED)
                    begun = written
        os.fsync(file.fileno())
    return written, digest.hexdigest()


def read_header(path: Path, expected_bytes: int) -> dict[str, Slot]:
    """The tensors of a shard; ValueError if the file is missing, shorter than expected, or not a shard."""
    fix = "restore the file, or remove its line from the index and capture again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, size))
    except FileNotFoundError:
        raise ValueError(f"shard {path} is missing, but the index lists it; {fix}") from None
    if size != expected_bytes:
        raise ValueError(f"shard {path} has {size:,} bytes, the index says {expected_bytes:,}: truncated?; {fix}")
    slots = {}
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                slots[name] = Slot(DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"shard {path} has no readable safetensors header ({error!r}); {fix}") from None
    for name, slot in slots.items():
        if not 8 + length <= slot.start <= slot.stop <= size:
            raise ValueError(f"shard {path}: {name} ends at byte {slot.stop:,}, the file has {size:,}; {fix}")
        if slot.stop - slot.start != prod(slot.shape) * slot.dtype.itemsize or slot.start % slot.dtype.itemsize:
            raise ValueError(f"shard {path}: {name} {list(slot.shape)} has {slot.stop - slot.start:,} bytes; {fix}")
    return slots


def map_tensors(path: Path, slots: dict[str, Slot]) -> dict[str, Tensor]:
    """The tensors of a shard as views of a private memory map: pages are read when they are touched."""
    size = max(slot.stop for slot in slots.values())
    file_map = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {name: file_map[slot.start : slot.stop].view(slot.dtype).view(slot.shape) for name, slot in slots.items()}
