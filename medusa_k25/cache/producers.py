"""Files of states that other engines and tools write, and what each of them is known to put into its files.

Letters: T tokens, L layers in a file, M positions with a state (the first M), D hidden.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DAMAGE = (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError, zlib.error)  # of the files themselves
ANY_FAULT = (*DAMAGE, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # or of what they hold
FINISHED = ("stop", "length", None)
OF_OTHER_LENGTH = (
    "states of {states} tokens for {tokens} token ids: prefix caching was on when they were computed{other}; switch it "
    "off and compute them again"
)


class Unfinished(Exception):
    """The producer is still writing: the next run will find the rest."""


@dataclass(frozen=True)
class Sample:
    """A text and its states as a file has them: often views of a memory map, of which nothing was read yet.

    ValueError unless its tensors are as said here: whoever goes on with them takes it for granted.
    """

    name: str  # the file below the imported folder, and the line where a file holds several texts
    ids_T: Tensor  # integers
    mask_T: Tensor | None  # bool, True on answer tokens; None: the producer does not know
    hidden_MD: Tensor  # of the last layer, in the file's dtype
    scales_M1: Tensor | None = None  # fp32: the state is hidden * scale
    finish_reason: str | None = None  # None: the producer does not say

    def __post_init__(self) -> None:
        for what, tensor, shape in (
            ("token ids", self.ids_T, ["tokens"]),
            ("flags of the loss mask", self.mask_T, ["tokens"]),
            ("last layer's states", self.hidden_MD, ["tokens", "hidden size"]),
        ):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
                kind = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"the {what} are a {kind}, expected a dense tensor on the CPU; write them as that")
            if tensor.dim() != len(shape):
                raise ValueError(
                    f"the {what} have shape {list(tensor.shape)}, expected [{', '.join(shape)}] of one text; write "
                    "each text by itself"
                )
        hidden_MD, scales_M1 = self.hidden_MD, self.scales_M1
        if self.ids_T.is_floating_point() or self.ids_T.is_complex() or self.ids_T.dtype == torch.bool:
            raise ValueError(f"the token ids are {self.ids_T.dtype}, expected integers; write the ids of the tokens")
        if not hidden_MD.is_floating_point():
            raise ValueError(
                f"the states are {hidden_MD.dtype}, expected floating point; write them as the model has them"
            )
        if hidden_MD.dtype.itemsize == 1 and scales_M1 is None:
            raise ValueError(
                f"the states are {hidden_MD.dtype} without scales; expected float8_e4m3fn with hidden_states_scales, a "
                "scale a token, or a wider dtype: compute them again in one of these"
            )
        if scales_M1 is not None and scales_M1.shape != (len(hidden_MD), 1):
            raise ValueError(f"{len(scales_M1)} scales for the states of {len(hidden_MD)} tokens, expected one a token")


Texts = Iterator[tuple[str, int, Callable[[], Sample]]]  # names, bytes that they take, and how to read them


class Producer(Protocol):
    @property
    def pattern(self) -> re.Pattern[str]:
        """Of the names of its files."""

    @property
    def normed(self) -> bool:
        """Whether its states have gone through the final norm."""

    @property
    def ids(self) -> str | None:
        """Whether the target generated its token ids ("generated") or they were made from text ("rendered")."""

    @property
    def known(self) -> str:
        """What it is known to write, in words."""

    def texts(self, file: Path, name: str) -> Texts:
        """(name, bytes, how to read it) of each text in a file, which is called `name` itself.

        ValueError, of this or of reading a text, says what is wrong with it; Unfinished says that the file will grow.
        """


class Vllm:
    """vLLM's extract_hidden_states with its ExampleHiddenStatesConnector."""

    pattern = re.compile(r".*\.safetensors")
    normed = False
    ids = None
    known = "the last of a file's layers is the target's last, before the final norm"

    def texts(self, file: Path, name: str) -> Texts:
        yield name, file.stat().st_size, partial(_read_safetensors, file, name)


class Speculators:
    """speculators: hs_{i}.safetensors of 0.9 beside the Arrow dataset with the masks, data_{i}.pt of 0.3."""

    pattern = re.compile(r"hs_\d+\.safetensors|data_\d+\.pt")
    normed = False
    ids = "rendered"
    known = "the last of a file's layers is the target's last, before the final norm"

    def texts(self, file: Path, name: str) -> Texts:
        read = self._read_pt if file.suffix == ".pt" else self._read_safetensors
        yield name, file.stat().st_size, partial(read, file, name)

    def _read_safetensors(self, file: Path, name: str) -> Sample:
        sample = _read_safetensors(file, name)
        index = int(file.stem.removeprefix("hs_"))
        rows = _arrow_rows(file.parent)
        if index >= len(rows):
            raise ValueError(f"the Arrow dataset has {len(rows)} rows, none for this file; was it made anew?")
        row = rows[index]
        if not torch.equal(row["input_ids"].long(), sample.ids_T.long()):
            raise ValueError(
                f"row {index} of the Arrow dataset has other token ids than the file ({len(row['input_ids'])} and "
                f"{len(sample.ids_T)}); was the dataset made anew? Import the files with the one that they were "
                "computed from"
            )
        return replace(sample, mask_T=row["loss_mask"].bool())

    def _read_pt(self, file: Path, name: str) -> Sample:
        with _named_damage():
            data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            ids_T, mask_T = data["input_ids"], torch.as_tensor(data["loss_mask"]).bool()
            hidden_TD = data["hidden_states"][-1]
        sample = Sample(name, ids_T, mask_T, hidden_TD)
        _require_equal_length(hidden_TD, ids_T)
        return sample


class SpecForge:
    """SpecForge's prepare_hidden_states for EAGLE-3 and DSpark."""

    pattern = re.compile(r"data_\d+\.ckpt(\.gz)?")
    normed = True
    ids = "rendered"
    known = "the target's last layer, after the final norm"

    def texts(self, file: Path, name: str) -> Texts:
        yield name, file.stat().st_size, partial(self._read, file, name)

    @staticmethod
    def _read(file: Path, name: str) -> Sample:
        with _named_damage():
            if file.suffix == ".gz":
                with gzip.open(file) as packed:
                    data = torch.load(io.BytesIO(packed.read()), map_location="cpu", weights_only=True)
            else:
                data = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            ids_T, mask_T = _only_row(data["input_ids"], 1), _only_row(data["loss_mask"], 1).bool()
            hidden_1TD = data.get("hidden_state", data.get("target_last_hidden_states"))
        if hidden_1TD is None:
            raise ValueError(
                f"holds no last state, only {', '.join(sorted(map(str, data)))}: files of the strategies dflash and "
                "domino are of no use here; prepare them with --strategy eagle3 or dspark"
            )
        sample = Sample(name, ids_T, mask_T, _only_row(hidden_1TD, 2))
        _require_equal_length(sample.hidden_MD, ids_T)
        return sample


class SglangJson:
    """Answers of SGLang's /generate with return_hidden_states, one a line, with the token ids that were sent."""

    pattern = re.compile(r".*\.jsonl?(\.gz)?")
    normed = True
    ids = "generated"
    known = "the target's last layer, after the final norm"

    def texts(self, file: Path, name: str) -> Texts:
        with _named_damage(), file.open("rb") as raw, gzip.open(raw) if file.suffix == ".gz" else raw as lines:
            before, unfinished = 0, False
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and not is_json(line):
                    unfinished = True
                    break
                before, size = raw.tell(), raw.tell() - before
                if line.strip():
                    yield f"{name}:{number}", size, partial(self._read, line, f"{name}:{number}")
        if unfinished:
            raise Unfinished

    @staticmethod
    def _read(line: bytes, name: str) -> Sample:
        with _named_damage():
            row = json.loads(line)
            prompt_ids, answer_ids, facts = row["input_ids"], row["output_ids"], row["meta_info"]
            rows: list[list[float]] = []
            for part in facts["hidden_states"]:  # the prompt's, a list a chunk of it; then one of each decoded token
                rows += part if isinstance(part[0], list) else [part]
            ids, hidden_MD = prompt_ids + answer_ids, torch.tensor(rows)
            reason = facts["finish_reason"]["type"] if facts.get("finish_reason") else None
            odd = [id for id in ids if type(id) is not int]  # a bool is an int, too
            ids_T = torch.tensor([] if odd else ids, dtype=torch.long)
        if odd:
            raise ValueError(f"token id {odd[0]!r}, expected an integer; save the ids as the engine gave them")
        if reason not in FINISHED:
            raise ValueError(
                f"finish_reason is {reason!r}, expected stop or length: the answer is not whole; generate it again"
            )
        mask_T = torch.arange(len(ids_T)) >= len(prompt_ids)
        sample = Sample(name, ids_T, mask_T, hidden_MD, finish_reason=reason)
        # nobody has read the last token
        _require_equal_length(hidden_MD, ids_T[:-1], ", or the prompt was read in chunks (--chunked-prefill-size)")
        return sample


PRODUCERS: dict[str, Producer] = {
    "vllm": Vllm(),
    "speculators": Speculators(),
    "specforge": SpecForge(),
    "sglang_json": SglangJson(),
}


def _read_safetensors(file: Path, name: str) -> Sample:
    """What vLLM wrote, as views of a memory map; it does not write a mask."""
    with _named_damage(), safe_open(file, framework="pt") as tensors:
        ids_T, hidden_TLD = tensors.get_tensor("token_ids"), tensors.get_tensor("hidden_states")
        scales_T1 = None
        if hidden_TLD.dtype == torch.float8_e4m3fn and "hidden_states_scales" in set(tensors.keys()):
            scales_T1 = tensors.get_tensor("hidden_states_scales").reshape(-1, 1)
    if hidden_TLD.dim() != 3 or not hidden_TLD.shape[1]:
        raise ValueError(f"hidden_states has shape {list(hidden_TLD.shape)}, expected [tokens, layers, hidden size]")
    sample = Sample(name, ids_T, None, hidden_TLD[:, -1], scales_T1)
    _require_equal_length(hidden_TLD, ids_T)
    return sample


def _only_row(tensor: Tensor, dims: int) -> Tensor:
    """Without the batch dimension of a batch of one; Sample refuses larger ones."""
    return tensor[0] if tensor.dim() == dims + 1 and len(tensor) == 1 else tensor


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@cache
def _arrow_rows(folder: Path) -> Any:
    """What speculators prepared the files in `folder` from: rows with `input_ids` and `loss_mask`, there or above."""
    from datasets import load_from_disk

    for place in (folder, folder.parent):
        if (place / "dataset_info.json").is_file():
            return load_from_disk(str(place)).with_format("torch", columns=["input_ids", "loss_mask"])
    raise ValueError(
        f"no Arrow dataset (dataset_info.json) in {folder} or the folder above it, and the loss masks are there; put "
        "it back, or take source=vllm, which reads the same files and finds the answers by their token ids"
    )


def _require_equal_length(hidden: Tensor, ids_T: Tensor, other: str = "") -> None:
    if len(hidden) != len(ids_T):
        raise ValueError(OF_OTHER_LENGTH.format(states=len(hidden), tokens=len(ids_T), other=other))


@contextmanager
def _named_damage() -> Iterator[None]:
    try:
        yield
    except ANY_FAULT as error:
        raise ValueError(damage(error)) from error


def damage(error: Exception) -> str:
    """What an error of ANY_FAULT says about the text that it came from."""
    if isinstance(error, UnpicklingError):  # its own advice is to load the file all the same
        return (
            "cannot be read (weights only): it is damaged, or holds Python objects, which could run code and are not "
            "loaded; write it with tensors and plain values alone"
        )
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if isinstance(error, OSError):
        return f"cannot be read ({what})"
    why = "truncated, or still being written?" if isinstance(error, DAMAGE) else "not a file of this source?"
    return f"cannot be read ({what}); {why}"
