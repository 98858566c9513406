"""Files of a folder that somebody else wrote: read with bounds, every fault a ValueError.

A server reads such a folder at its start, and must end up with an error rather than without memory. So JSON is bounded
in size, and of a safetensors file the header is judged first: what is allocated for its tensors is never more than the
file's own length. Nothing is memory-mapped: a file that shrinks under a map kills the process that reads it.
"""

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from medusa_k25.cache.shard import as_bytes

MAX_JSON_BYTES = 1 << 20  # a config with the largest tree takes less; a header of 2,000 tensors 250 KB
MAX_DIMENSIONS = 4
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes from the start of the file
    nbytes: int


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError unless it is one, of at most MAX_JSON_BYTES."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"{file} is larger than {MAX_JSON_BYTES:,} bytes, no config is; fetch it again")
    return parse_object(text, file)


def parse_object(text: bytes, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: brackets nested thousands deep
        raise ValueError(f"{file} is damaged ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected an object, got {type(content).__name__}; fetch it again")
    return content


def integer(config: Mapping[str, Any], key: str, largest: int, file: Path, default: int | None = None) -> int:
    """config[key], which must be an integer from 1 to `largest`. `default` stands for a key that is not there."""
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"{file} lacks '{key}'; export or fetch it again")
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"{file}: {key} is {reprlib.repr(value)}, expected an integer from 1 to {largest:,}")
    return value


def boolean(config: Mapping[str, Any], key: str, default: bool, file: Path) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"{file}: {key} is {reprlib.repr(value)}, expected true or false")
    return value


def number(config: Mapping[str, Any], key: str, file: Path) -> float:
    """config[key], which must be a number from 0 to 1."""
    value: Any = config.get(key)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{file}: {key} is {reprlib.repr(value)}, expected a number from 0 to 1")
    return value


def read_header(file: Path) -> dict[str, Slot]:
    """The tensors of a safetensors file by name, none of which has been read.

    ValueError unless they lie one behind the other and fill the file, each as long as its shape says.
    """
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if length > min(MAX_JSON_BYTES, size - 8):
                raise ValueError(f"{file} is damaged: its header claims {length:,} bytes; fetch it again")
            header = parse_object(opened.read(length), file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    slots = {name: _slot(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if slot.start != end:
            raise ValueError(f"{file} is damaged: '{printable(name)}' does not begin where the tensor before it ends")
        end += slot.nbytes
    if end != size:
        raise ValueError(f"{file} is damaged: its header describes {end:,} bytes, it has {size:,}; fetch it again")
    return slots


def _slot(file: Path, name: str, entry: Any, data_start: int) -> Slot:
    try:
        dtype, shape, (start, stop) = DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        plain = all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is damaged: its header describes '{printable(name)}' in no known way") from None
    if dtype is None:
        raise ValueError(
            f"{file}: '{printable(name)}' is {reprlib.repr(entry['dtype'])}, expected one of {', '.join(DTYPES)}"
        )
    if not plain or len(shape) > MAX_DIMENSIONS or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{file} is damaged: '{printable(name)}' has another length than its shape {reprlib.repr(shape)}"
        )
    return Slot(dtype, torch.Size(shape), data_start + start, stop - start)


def read_tensor(opened: BinaryIO, name: str, slot: Slot, place: Tensor) -> None:
    """Fill the contiguous CPU tensor `place`, of the slot's dtype and shape.

    ValueError for NaN, for infinity, and for a file that ends before the tensor does.
    """
    assert (place.dtype, place.shape) == (slot.dtype, slot.shape)
    opened.seek(slot.start)
    if opened.readinto(as_bytes(place)) != slot.nbytes:  # type: ignore[attr-defined]  # BufferedReader has it
        raise ValueError(f"{opened.name}: '{name}' ends too early; fetch it again")
    if place.is_floating_point() and place.numel() and not all(bound.isfinite() for bound in place.aminmax()):
        raise ValueError(f"{opened.name}: '{name}' holds NaN or infinity: these are no trained weights")


def printable(name: str) -> str:
    """A stranger's name for an error message: short, ASCII, without control characters."""
    return ascii(name)[1:-1] if len(name) <= 100 else f"{ascii(name[:100])[1:-1]}..."
