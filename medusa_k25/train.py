"""Train heads on a cache: python -m medusa_k25.train [+exp=NAME] [key=value ...]

Letters: D hidden, V vocabulary, M draft vocabulary, K heads.
"""

import logging
import os
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from medusa_k25 import __version__
from medusa_k25.cache import Cache
from medusa_k25.callbacks import Checkpoints, Progress, Stopped
from medusa_k25.checkpoint import complete_checkpoints, find_checkpoint, load_heads, read_record
from medusa_k25.config import EXIT_REQUEUE, verb
from medusa_k25.costs import CPU_SHARE_OF_PEAK, GB, GPU_SHARE_OF_PEAK, TrainingCost, peak_flops
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import documents_of, token_counts
from medusa_k25.heads import DraftVocabulary
from medusa_k25.loss import matmul_dtype
from medusa_k25.module import MedusaModule
from medusa_k25.report import read_report, update_report
from medusa_k25.target import Target
from medusa_k25.tracking import MetricsTable
from medusa_k25.warm_start import warm_start

say = rank_zero_only(print)


@dataclass(frozen=True)
class Training:
    module: MedusaModule
    data: MedusaData
    trainer: L.Trainer
    cost: TrainingCost
    summary: str


@verb("target", "data", "heads", "loss", "optimizer", "schedule", "trainer", "strategy", "logger")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN and device_count(cfg.trainer) * cfg.trainer.num_nodes > 1:
        raise ValueError(
            "a sweep (--multirun) with several devices: every rank would start the whole sweep again. Run the "
            "settings one after another in a shell loop, each with its own name=, or set trainer.devices=1"
        )
    train(cfg)


def train(cfg: DictConfig) -> None:
    missing = not (Path(cfg.cache) / "manifest.json").is_file()
    if missing and not cfg.make_missing_inputs:
        raise ValueError(
            f"no cache at {cfg.cache}. `python -m medusa_k25.generate` writes the target's own answers to "
            f"{cfg.conversations}, `python -m medusa_k25.capture` turns them into a cache; or point cache= to one"
        )
    target = instantiate(cfg.target)
    run_dir = Path(cfg.run_dir)
    # a capture that ended has its section in report.json; a killed one leaves part of a cache
    killed = Path(cfg.cache).is_relative_to(run_dir) and "capture" not in read_report(run_dir)
    if missing or (cfg.make_missing_inputs and killed and Path(cfg.conversations).exists()):
        make_inputs(cfg, target)
    cache = Cache.open(Path(cfg.cache), target)
    checkpoints = run_dir / "checkpoints"
    last = find_checkpoint(checkpoints, "last") if complete_checkpoints(checkpoints) else None
    training = build(cfg, target, cache, last)
    claim(run_dir, cfg, target, cache)
    say(training.summary)

    if last is not None:
        step = read_record(last)["step"]
        if step >= cfg.trainer.max_steps:
            say(f"{run_dir} is trained to step {step} already; raise trainer.max_steps to go on")
            return
        say(f"going on from {last}")
        say_if_steps_changed(cfg, read_record(last), training.cost)
        MetricsTable(run_dir).resume(step)
    try:
        training.trainer.fit(
            training.module,
            datamodule=training.data,
            ckpt_path=None if last is None else last / "trainer.ckpt",
            weights_only=True,
        )
    except Stopped as stopped:
        say(f"stopped at {find_checkpoint(checkpoints, 'last')}; the same command goes on from there")
        if stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(EXIT_REQUEUE)
    if training.trainer.is_global_zero:
        best = load_heads(find_checkpoint(checkpoints, "best"))
        metrics = best.record["metrics"]
        update_report(run_dir, "train", {"checkpoint": str(best.path), "metrics": metrics})
        print(
            f"acceptance length on held-out text {metrics['heldout/acceptance_tree']:.3f} "
            f"(tree of {cfg.num_nodes} nodes), {metrics['heldout/acceptance_chain']:.3f} (chain); "
            f"best checkpoint: {best.path}"
        )


def say_if_steps_changed(cfg: DictConfig, record: dict[str, Any], cost: TrainingCost) -> None:
    """Other ranks take other steps unless the user keeps the product; every window is seen once an epoch anyway."""
    old = record["config"]
    before = record["world_size"] * old["data"]["batch_size"] * old["trainer"]["accumulate_grad_batches"]
    now = cost.world_size * cfg.data.batch_size * cfg.trainer.accumulate_grad_batches
    if now != before:
        say(
            f"note: a step takes {now} windows from here on, not {before}; to keep it, choose "
            f"data.batch_size x trainer.accumulate_grad_batches = {before / cost.world_size:g}"
        )


def make_inputs(cfg: DictConfig, target: Target) -> None:
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        raise ValueError("the inputs are missing: run medusa_k25.generate and medusa_k25.capture before several ranks")
    from medusa_k25.capture import capture
    from medusa_k25.generate import generate

    print(f"no whole cache at {cfg.cache}: making it first, from the target's own answers (generate, then capture)")
    generate(cfg, target)
    capture(cfg, target)


# What makes a run that run, besides its target and cache: their folders may move, and it may be prolonged, go on with
# other ranks, and log or load otherwise
IDENTITY = {
    *("seed", "draft_vocab_size", "num_nodes", "max_width", "warm_start"),
    *("data", "heads", "loss", "optimizer", "schedule", "trainer", "strategy"),
}
FREE = {
    "data.batch_size",
    "data.num_workers",
    "trainer.max_steps",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accumulate_grad_batches",
    "trainer.log_every_n_steps",
}


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
    run_dir.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"config.{os.getpid()}.part")  # all ranks write the same
    part.write_text(text)
    part.rename(file)


def facts(text: str) -> dict[str, Any]:
    """The identity of the run that a config.yaml belongs to; its first line names target and cache."""
    config = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(config, dict)
    values = flat({key: config.get(key) for key in IDENTITY})
    return {"made with": text.partition("\n")[0]} | {k: v for k, v in values.items() if k not in FREE}


def flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for key, value in node.items() for k, v in flat(value, f"{path}.{key}".lstrip(".")).items()}


def build(cfg: DictConfig, target: Target, cache: Cache, last: Path | None = None) -> Training:
    """All objects of a training run, and the arithmetic that it depends on. `last`: the checkpoint to go on from."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # what a run needs to know, its summary says
    # the states are read faster than they are used, see bench/cache_reader.py
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 with torch 2.13
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    for key in ("max_steps", "val_check_interval", "accumulate_grad_batches", "log_every_n_steps", "num_nodes"):
        if not isinstance(cfg.trainer[key], int) or cfg.trainer[key] < 1:
            raise ValueError(f"trainer.{key}={cfg.trainer[key]}: expected a whole number, at least 1")
    L.seed_everything(cfg.seed, verbose=False)
    loss = instantiate(cfg.loss)
    counts_V = token_counts(cache, documents_of(cache, "train"))
    vocabulary = DraftVocabulary.most_frequent(counts_V, cfg.draft_vocab_size)
    lm_head_MD = vocabulary.rows(target.lm_head)
    heads = instantiate(cfg.heads)(hidden_size=target.hidden_size, draft_vocab_size=len(vocabulary))
    heads.init_lm_heads(lm_head_MD)
    if cfg.warm_start is not None and last is None:
        say(warm_start(heads, vocabulary, Path(cfg.warm_start), cfg.warm_start_min_match))
    data: MedusaData = instantiate(cfg.data)(
        cache=cache,
        num_heads=heads.num_heads,
        draftable_V=vocabulary.to_draft(torch.arange(target.vocab_size)) != IGNORE,
        teacher_states=loss.needs_teacher,
    )
    dtype = torch.float32 if str(cfg.trainer.precision).startswith("32") else torch.bfloat16
    module = MedusaModule(
        heads,
        vocabulary,
        lm_head_MD.to(dtype),
        loss,
        instantiate(cfg.optimizer),
        instantiate(cfg.schedule),
        cfg.num_nodes,
        cfg.max_width,
        cfg.trainer.log_every_n_steps,
    )
    record = {
        "target": {
            "name": target.name,
            "revision": target.revision,
            "quantisation": target.quantisation,
            "fingerprints": target.fingerprints,
        },
        "cache_fingerprint": cache.fingerprint,
        "code_version": __version__,
        "config": OmegaConf.to_container(cfg, resolve=True),
    }
    checkpoints = Checkpoints(Path(cfg.run_dir) / "checkpoints", data, record)
    devices = device_count(cfg.trainer)
    device = torch.device("cuda" if torch.cuda.is_available() and cfg.trainer.accelerator != "cpu" else "cpu")
    data.refuse_idle_ranks(devices * cfg.trainer.num_nodes)
    cost = cost_of(cfg, module, data, devices, device)
    refuse_what_cannot_fit(cost, Path(cfg.run_dir), device, devices)
    peak = peak_flops(device, matmul_dtype(torch.empty(0, dtype=dtype, device=device)))
    strategy = instantiate(cfg.strategy)(
        devices=devices,
        num_nodes=cfg.trainer.num_nodes,
        micro_batch=cfg.data.batch_size,
        resume_world_size=None if last is None else read_record(last)["world_size"],
    )
    trainer = instantiate(
        cfg.trainer,
        devices=devices,
        strategy=strategy,
        val_check_interval=cfg.trainer.val_check_interval * cfg.trainer.accumulate_grad_batches,  # Lightning's unit
        logger=instantiate(cfg.logger),
        plugins=[SLURMEnvironment(auto_requeue=False)] if SLURMEnvironment.detect() else [],  # Stopped does it
        callbacks=[Progress(cost.flops_per_position, peak), checkpoints],
        enable_progress_bar=False,  # our own Progress
        default_root_dir=cfg.run_dir,
        enable_checkpointing=False,  # and Checkpoints
    )
    coverage = {
        "training": vocabulary.coverage(counts_V),
        "calibration": vocabulary.coverage(token_counts(cache, data.documents["calibration"])),
    }
    summary = summarise(cfg, target, module, data, cost, peak, coverage)
    return Training(module, data, trainer, cost, summary)


def device_count(trainer: Any) -> int:
    """Devices a node: `auto` is every GPU, or one CPU process."""
    if trainer.devices == "auto":
        return max(1, torch.cuda.device_count()) if trainer.accelerator in ("auto", "gpu", "cuda") else 1
    return int(trainer.devices)


def cost_of(
    cfg: DictConfig, module: MedusaModule, data: MedusaData, devices: int, device: torch.device
) -> TrainingCost:
    M, D = module.lm_head_MD.shape
    heads = module.heads
    own = 0 if heads.lm_heads is None else heads.lm_heads.weight.numel()
    parameters = sum(parameter.numel() for parameter in heads.parameters()) - own
    return TrainingCost(
        K=heads.num_heads,
        N=cfg.data.batch_size * cfg.data.window,
        D=D,
        M=M,
        parameters=parameters,
        further_parameters=parameters * (cfg.heads.num_blocks - 1) // cfg.heads.num_blocks,
        blocks=cfg.heads.num_blocks,
        own_lm_head=heads.own_lm_head,
        teacher=module.loss.needs_teacher,
        strategy=cfg.strategy.name,
        world_size=devices * cfg.trainer.num_nodes,
        low_precision=module.lm_head_MD.dtype == torch.bfloat16,
        device_type=device.type,
        longest_answer=max(run.row_stop - run.row_start for run in data.windows.runs),
    )


def refuse_what_cannot_fit(cost: TrainingCost, run_dir: Path, device: torch.device, devices: int) -> None:
    """ValueError, before anything has started, when the run needs more memory or disk than there is."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info()[0]
    else:
        available = psutil.virtual_memory().available // devices
    if cost.memory_bytes > available:
        parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in cost.memory.items())
        raise ValueError(
            f"a device would need {cost.memory_bytes / GB:.1f} GB ({parts}), {available / GB:.1f} GB are free. "
            f"It would fit with: {cost.smaller(available)}"
        )
    folder = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if cost.disk_bytes > free:
        raise ValueError(
            f"the checkpoints need {cost.disk_bytes / GB:.1f} GB, {free / GB:.1f} GB are free in {folder}; "
            "choose run_dir= on another disk, or train fewer parameters (heads.num_blocks, heads.own_lm_head)"
        )


def summarise(
    cfg: DictConfig,
    target: Target,
    module: MedusaModule,
    data: MedusaData,
    cost: TrainingCost,
    peak: float,
    coverage: dict[str, float],
) -> str:
    windows_a_step = cfg.data.batch_size * cost.world_size * cfg.trainer.accumulate_grad_batches
    positions_a_step = windows_a_step * cfg.data.window
    steps_an_epoch = len(data.windows) / windows_a_step
    documents = {split: len(documents) for split, documents in data.documents.items()}
    states_GB = data.cache.num_states * cost.D * data.cache.storage_dtype.itemsize / GB
    heads = f"{cost.K} x {type(module.heads).__name__}"
    share = GPU_SHARE_OF_PEAK if cost.device_type == "cuda" else CPU_SHARE_OF_PEAK
    # ranks on a CPU share its cores
    positions_per_s = share * peak * (cost.world_size if cost.device_type == "cuda" else 1) / cost.flops_per_position
    minutes = cfg.trainer.max_steps * positions_a_step / positions_per_s / 60
    memory = ", ".join(f"{part} {size / GB:.2f}" for part, size in cost.memory.items() if size)
    return "\n".join(
        [
            f"target      {target.name}: D={cost.D:,}, V={target.vocab_size:,}",
            f"cache       {data.cache.path}: {data.cache.num_tokens:,} tokens, {data.cache.num_states:,} states in "
            f"{states_GB:.2f} GB; documents: {', '.join(f'{count} {split}' for split, count in documents.items())}",
            f"heads       {heads}: {cost.trained / 1e6:.2f} M parameters",
            f"vocabulary  {cost.M:,} of {target.vocab_size:,} tokens: "
            f"{', '.join(f'{share:.1%} of the {text} text' for text, share in coverage.items())}",
            f"memory      {cost.memory_bytes / GB:.2f} GB a device: {memory}",
            f"disk        {cost.disk_bytes / GB:.2f} GB for checkpoints",
            f"step        {cfg.data.batch_size} windows x {cfg.data.window} positions x {cost.world_size} ranks x "
            f"{cfg.trainer.accumulate_grad_batches} accumulated = {positions_a_step:,} positions",
            f"run         {cfg.trainer.max_steps} steps, {steps_an_epoch:.1f} an epoch: "
            f"{cfg.trainer.max_steps / steps_an_epoch:.1f} epochs of {data.windows.num_positions:,} positions",
            f"time        about {minutes:.0f} minutes at {positions_per_s:,.0f} positions/s ({share:.0%} of "
            f"{peak / 1e12:.2f} TFLOP/s a device, {cost.flops_per_position / 1e9:.2f} GFLOP a position)",
        ]
    )


if __name__ == "__main__":
    main()
