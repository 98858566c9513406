"""Checkpoints: what training needs to go on, and beside it what everyone else reads.

checkpoints/step-000200/trainer.ckpt       Lightning's (with DeepSpeed: a folder)
checkpoints/step-000200/heads.safetensors  weights and draft vocabulary, whole tensors under any strategy
checkpoints/step-000200/heads.json         type, arguments, provenance, metrics; the folder appears when all is written
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from medusa_k25.heads import HEADS, DraftVocabulary, Heads, Speculator, kind_of
from medusa_k25.target import Target, refuse_other_target

SCORE = "calibration/speedup"  # what "best" means


@dataclass(frozen=True)
class HeadsCheckpoint:
    path: Path
    heads: Heads
    vocabulary: DraftVocabulary
    record: dict[str, Any]

    def refuse_other_target(self, target: Target, allow_mismatch: bool = False) -> list[str]:
        """In what `target` differs from the one on whose states these heads were trained, with a warning.

        ValueError if it does and that is not allowed, and always for other sizes.
        """
        sizes = (self.heads.hidden_size, self.vocabulary.vocab_size), (target.hidden_size, target.vocab_size)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{self.path} holds heads of hidden size and vocabulary size {sizes[0]}, target {target.name} has "
                f"{sizes[1]}; choose the target they were trained for, or train anew"
            )
        return refuse_other_target(str(self.path), self.record["target"], target, allow_mismatch)

    def speculator(self, target: Target, device: str | torch.device = "cpu") -> Speculator:
        return Speculator.of(self.heads, self.vocabulary, target, device)


def write_heads(
    folder: Path, state: Mapping[str, Tensor], heads: Heads, vocabulary: DraftVocabulary, record: Mapping[str, Any]
) -> None:
    """`state` holds the whole tensors of `heads` (which under ZeRO-3 holds only shares of them)."""
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}
    # not save_file: its files are readable by their owner alone
    (folder / "heads.safetensors").write_bytes(save({**tensors, "draft_vocabulary": vocabulary.token_ids_M}))
    written = {
        "format_version": 1,
        "heads": {"type": kind_of(heads), **heads.arguments},
        "vocab_size": vocabulary.vocab_size,
        **record,
    }
    (folder / "heads.json").write_text(json.dumps(written, indent=2) + "\n")


def load_heads(folder: Path) -> HeadsCheckpoint:
    """Heads in fp32, strictly: every tensor in its place."""
    try:
        record = json.loads((folder / "heads.json").read_text())
        tensors = load_file(folder / "heads.safetensors")
        arguments = dict(record["heads"])
        heads = HEADS[arguments.pop("type")](**arguments)
        vocabulary = DraftVocabulary(tensors.pop("draft_vocabulary"), record["vocab_size"])
        heads.load_state_dict(tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} holds no readable heads ({reason}); choose another checkpoint") from None
    return HeadsCheckpoint(folder, heads.eval(), vocabulary, record)


def complete_checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints of a run, oldest first."""
    paths = [file.parent for file in folder.glob("step-*/heads.json") if re.fullmatch(r"step-\d+", file.parent.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_checkpoint(folder: Path, which: str | int) -> Path:
    """`which`: "best" (the fastest on calibration text), "last", a step number, or a checkpoint's path."""
    which = str(which)  # a step comes as an int from the command line
    paths = complete_checkpoints(folder)
    by_step = {str(step_of(path)): path for path in paths}
    if which not in ("best", "last", *by_step) and Path(which).is_dir():
        return Path(which)
    if not paths:
        raise ValueError(f"no checkpoint in {folder}; run medusa_k25.train first, or give checkpoint=FOLDER")
    if which == "last":
        return paths[-1]
    if which == "best":
        return max(reversed(paths), key=score)  # of equals the last
    if which not in by_step:
        raise ValueError(f"checkpoint={which}: expected best, last, a folder, or one of the steps {', '.join(by_step)}")
    return by_step[which]


def read_record(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "heads.json").read_text())
    except ValueError as error:
        raise ValueError(
            f"{path}/heads.json is damaged ({error}); remove that checkpoint to use the one before"
        ) from None


def waited_enough(validations_since_best: int, patience: int | None) -> bool:
    """Whether a training ends early: see `patience` in conf/config.yaml."""
    return patience is not None and validations_since_best >= patience


def score(path: Path) -> float:
    """Speed on calibration text; below all others for a checkpoint of a run that was told to stop."""
    return read_record(path)["metrics"].get(SCORE, float("-inf"))


def drop_superseded(folder: Path) -> None:
    """Keep the best and the last checkpoint."""
    paths = complete_checkpoints(folder)
    for path in set(paths) - {find_checkpoint(folder, "best"), find_checkpoint(folder, "last")}:
        shutil.rmtree(path)
