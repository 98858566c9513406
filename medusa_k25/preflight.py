"""Before a run starts: what it will take, whether that fits, and whose folder it is.

Letters: K heads, N positions of a micro-batch, D hidden, M draft vocabulary, V target vocabulary.
"""

import os
import shutil
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from medusa_k25 import __version__
from medusa_k25.cache import Cache
from medusa_k25.checkpoint import complete_checkpoints
from medusa_k25.config import FREE, IDENTITY
from medusa_k25.costs.training import CPU_SHARE_OF_PEAK, GB, GPU_SHARE_OF_PEAK, TrainingCost
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.heads import Heads
from medusa_k25.target import Target


def device_count(trainer: Any) -> int:
    """Devices a node: `auto` is every GPU, or one CPU process."""
    if trainer.devices == "auto":
        return max(1, torch.cuda.device_count()) if trainer.accelerator in ("auto", "gpu", "cuda") else 1
    if not isinstance(trainer.devices, int) or trainer.devices < 1:
        raise ValueError(
            f"trainer.devices={trainer.devices}: expected a number of devices, or auto; "
            "CUDA_VISIBLE_DEVICES chooses which"
        )
    return trainer.devices


def own_device(trainer: Any) -> torch.device:
    """The device of this rank; looking at another one would leave a CUDA context there."""
    if trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def cost_of(
    cfg: DictConfig,
    heads: Heads,
    draft_vocab_size: int,
    vocab_size: int,
    teacher: bool,
    data: MedusaData,
    devices: int,
    device: torch.device,
) -> TrainingCost:
    return TrainingCost(
        heads,
        N=cfg.data.batch_size * cfg.data.window,
        M=draft_vocab_size,
        V=vocab_size,
        teacher=teacher,
        strategy=cfg.strategy.name,
        world_size=devices * cfg.trainer.num_nodes,
        low_precision=not str(cfg.trainer.precision).startswith("32"),
        device_type=device.type,
        longest_answer=max(run.row_stop - run.row_start for run in data.windows.runs),
    )


def refuse_what_cannot_fit(cost: TrainingCost, run_dir: Path, device: torch.device, devices: int) -> None:
    """ValueError, before anything has started, when the run needs more memory or disk than there is."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        available = psutil.virtual_memory().available // devices
    if cost.memory_bytes > available:
        parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in cost.memory.items())
        raise ValueError(
            f"a device would need {cost.memory_bytes / GB:.1f} GB ({parts}), {available / GB:.1f} GB are free. "
            f"It would fit with: {cost.smaller(available)}"
        )
    folder = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    own = sum(file.stat().st_size for file in (run_dir / "checkpoints").rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free + own  # the run's own checkpoints will make room
    if cost.disk_bytes > free:
        raise ValueError(
            f"the checkpoints need {cost.disk_bytes / GB:.1f} GB, {free / GB:.1f} GB are free in {folder}; "
            "choose run_dir= on another disk, or train fewer parameters (heads.own_lm_head=false, smaller heads)"
        )


def summarise(
    cfg: DictConfig,
    target: Target,
    heads: Heads,
    data: MedusaData,
    cost: TrainingCost,
    peak: float,
    coverage: dict[str, float],
) -> str:
    windows_a_step = cfg.data.batch_size * cost.world_size * cfg.trainer.accumulate_grad_batches
    positions_a_step = windows_a_step * cfg.data.window
    steps_an_epoch = ceil(len(data.windows) / windows_a_step)  # a step never crosses an epoch
    documents = {split: len(documents) for split, documents in data.documents.items()}
    states_GB = data.cache.num_states * cost.D * data.cache.storage_dtype.itemsize / GB
    share = GPU_SHARE_OF_PEAK if cost.device_type == "cuda" else CPU_SHARE_OF_PEAK
    # ranks on a CPU share its cores
    positions_per_s = share * peak * (cost.world_size if cost.device_type == "cuda" else 1) / cost.flops_per_position
    epochs = cfg.trainer.max_steps / steps_an_epoch
    answers = cfg.trainer.get("limit_val_batches", None)  # a rank and split
    validated = sum(
        run.row_stop - run.row_start
        for runs in data.validation_runs
        for run in runs[: None if answers is None else answers * cost.world_size]
    )
    validations = ceil(cfg.trainer.max_steps / cfg.trainer.val_check_interval)
    work = epochs * data.windows.num_positions * cost.flops_per_position
    work += validations * validated * cost.forward_flops_per_position
    seconds = work / (positions_per_s * cost.flops_per_position)
    duration = f"{seconds / 60:.0f} minutes" if seconds > 120 else f"{seconds:.0f} s"
    memory = ", ".join(f"{part} {size / GB:.2f}" for part, size in cost.memory.items() if size)
    return "\n".join(
        [
            f"target      {target.name}: D={cost.D:,}, V={target.vocab_size:,}",
            f"cache       {data.cache.path}: {data.cache.num_tokens:,} tokens, {data.cache.num_states:,} states in "
            f"{states_GB:.2f} GB; documents: {', '.join(f'{count} {split}' for split, count in documents.items())}"
            + (
                f"; {data.left_out} left out, their prompts are in a split that is reported on" if data.left_out else ""
            ),
            *([f"stage       {data.stage}"] if data.stage is not None else []),
            f"heads       {cost.K} x {type(heads).__name__}: {cost.trained / 1e6:.2f} M parameters",
            f"vocabulary  {cost.M:,} of {target.vocab_size:,} tokens: "
            f"{', '.join(f'{share:.1%} of the {text} text' for text, share in coverage.items())}",
            f"memory      {cost.memory_bytes / GB:.2f} GB a device: {memory}",
            f"disk        {cost.disk_bytes / GB:.2f} GB for checkpoints",
            f"step        {cfg.data.batch_size} windows x {cfg.data.window} positions x {cost.world_size} ranks x "
            f"{cfg.trainer.accumulate_grad_batches} accumulated = {positions_a_step:,} positions",
            f"run         {cfg.trainer.max_steps} steps, {steps_an_epoch} an epoch: "
            f"{epochs:.1f} epochs of {data.windows.num_positions:,} positions; {validations} validations of "
            f"{validated:,}",
            f"time        about {duration} at {positions_per_s:,.0f} positions/s ({share:.0%} of "
            f"{peak / 1e12:.2f} TFLOP/s a device, {cost.flops_per_position / 1e9:.2f} GFLOP a position)",
        ]
    )


def note_on_steps(cfg: DictConfig, record: dict[str, Any], cost: TrainingCost) -> str | None:
    """Other ranks take other steps unless the user keeps the product; every window is seen once an epoch anyway."""
    old = record["config"]
    before = record["world_size"] * old["data"]["batch_size"] * old["trainer"]["accumulate_grad_batches"]
    now = cost.world_size * cfg.data.batch_size * cfg.trainer.accumulate_grad_batches
    if now == before:
        return None
    return (
        f"note: a step takes {now} windows from here on, not {before}; to keep it, choose "
        f"data.batch_size x trainer.accumulate_grad_batches = {before / cost.world_size:g}"
    )


def claim(run_dir: Path, cfg: DictConfig, target: Target, cache: Cache) -> None:
    """Write config.yaml into the run folder; ValueError when the folder holds checkpoints of something else."""
    head = f"# medusa_k25 {__version__}, target {target.name} {target.revision}, cache {cache.fingerprint}\n"
    text = head + OmegaConf.to_yaml(cfg, resolve=True)
    file = run_dir / "config.yaml"
    if complete_checkpoints(run_dir / "checkpoints") and file.exists():
        old, new = facts(file.read_text()), facts(text)
        if old != new:
            differing = [f"{key}: {new.get(key)}" for key in {**new, **old} if new.get(key) != old.get(key)]
            raise ValueError(
                f"{run_dir} holds another run (this one differs in: {'; '.join(differing[:5])}); "
                "choose another name=, or repeat that run's command to continue it"
            )
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        run_dir.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(text)
        part.rename(file)


def facts(text: str) -> dict[str, Any]:
    """The identity of the run that a config.yaml belongs to; its first line names target and cache."""
    config = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(config, dict)
    values = flat({key: config.get(key) for key in IDENTITY})
    made_with = text.partition("\n")[0].partition(", ")[2]  # whatever version wrote it
    return {"made with": made_with} | {k: v for k, v in values.items() if k not in FREE}


def flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, value in node.items() for k, v in flat(value, f"{path}.{key}".lstrip(".")).items()}
