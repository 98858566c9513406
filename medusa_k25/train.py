"""Train heads on a cache: python -m medusa_k25.train [+exp=NAME] [key=value ...]

Letters: D hidden, V vocabulary, M draft vocabulary, K heads.
"""

import logging
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from medusa_k25 import __version__
from medusa_k25.cache import Cache
from medusa_k25.callbacks import Checkpoints, Progress, Stopped
from medusa_k25.checkpoint import complete_checkpoints, find_checkpoint, load_heads, read_record, waited_enough
from medusa_k25.config import EXIT_REQUEUE, verb
from medusa_k25.costs.cycle import COMPARED_NODES, CycleModel
from medusa_k25.costs.training import TrainingCost, peak_flops
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import documents_of, in_share, token_counts
from medusa_k25.heads import DraftVocabulary, Embeddings, Heads
from medusa_k25.loss import matmul_dtype
from medusa_k25.module import MedusaModule
from medusa_k25.preflight import (
    claim,
    cost_of,
    device_count,
    note_on_steps,
    own_device,
    refuse_what_cannot_fit,
    summarise,
)
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.target import Target
from medusa_k25.tracking import MetricsTable, WandbRun
from medusa_k25.warm_start import warm_start

say = rank_zero_only(print)

SHOWN_SIZES = (2, 3, 4, 5, 8, 16)  # of a pass, in the summary


@dataclass(frozen=True)
class Training:
    module: MedusaModule
    data: MedusaData
    trainer: L.Trainer
    cost: TrainingCost
    record: dict[str, Any]  # where the heads come from: target, cache, code and configuration
    summary: str


@verb("target", "data", "heads", "loss", "optimizer", "schedule", "trainer", "strategy", "logger", "hardware")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN and device_count(cfg.trainer) * cfg.trainer.num_nodes > 1:
        raise ValueError(
            "a sweep (--multirun) with several devices: every rank would start the whole sweep again. Run the "
            "settings one after another in a shell loop, each with its own name=, or set trainer.devices=1"
        )
    for number in (signal.SIGTERM, signal.SIGUSR1):  # until Checkpoints takes over there is nothing to save
        signal.signal(number, lambda *_: sys.exit(EXIT_REQUEUE))
    train(cfg)


def train(cfg: DictConfig) -> None:
    missing = not (Path(cfg.cache) / "manifest.json").is_file()
    owner = owner_of_inputs(cfg)
    if missing and not cfg.make_missing_inputs:
        raise ValueError(
            f"no cache at {cfg.cache}. `python -m medusa_k25.generate` writes the target's own answers to "
            f"{cfg.conversations}, `python -m medusa_k25.capture` turns them into a cache; or point cache= to one"
        )
    target = instantiate(cfg.target)
    run_dir = Path(cfg.run_dir)
    # a capture that ended has its section in report.json; a killed one leaves part of a cache
    killed = owner is not None and "capture" not in read_report(owner)
    if cfg.dry_run and missing:
        raise ValueError(f"dry_run=true, but there is no cache at {cfg.cache} to measure; make it, or name another")
    if missing or (not cfg.dry_run and cfg.make_missing_inputs and killed and Path(cfg.conversations).exists()):
        make_inputs(cfg, target)
    cache = Cache.open(Path(cfg.cache), target, allow_target_mismatch=cfg.allow_target_mismatch)
    checkpoints = run_dir / "checkpoints"
    last = find_checkpoint(checkpoints, "last") if complete_checkpoints(checkpoints) else None
    if cfg.resume not in ("auto", "never"):
        raise ValueError(f"resume={cfg.resume}: expected auto or never")
    if cfg.resume == "never" and last is not None:
        raise ValueError(
            f"resume=never, but {run_dir} holds {last.name}; choose another name=, or resume=auto to go on"
        )
    training = build(cfg, target, cache, last)
    if cfg.dry_run:
        say(training.summary)
        return
    claim(run_dir, cfg, target, cache)
    say(training.summary)

    step = 0 if last is None else read_record(last)["step"]
    if last is not None:
        if ended := how_it_ended(cfg, read_record(last)):
            say(f"{run_dir} {ended}")
            if "train" not in read_report(run_dir):  # killed after its last checkpoint
                conclude(cfg, training)
            return
        if not (last / "trainer.ckpt").exists():
            raise ValueError(f"{last} has no trainer.ckpt to go on from; remove that folder to use the one before")
        say(f"going on from {last}")
        if note := note_on_steps(cfg, read_record(last), training.cost):
            say(note)
    MetricsTable(run_dir).resume(step)
    for logger in training.trainer.loggers:
        logger.log_hyperparams(training.record)
    try:
        training.trainer.fit(
            training.module,
            datamodule=training.data,
            ckpt_path=None if last is None else last / "trainer.ckpt",
            weights_only=True,
        )
    except Stopped as stopped:
        say(f"stopped at {find_checkpoint(checkpoints, 'last')}; the same command goes on from there")
        if started_by_rank_zero(training.trainer):
            sys.exit()  # rank 0 would be killed for another status, before it can end with its own
        if stopped.signal == signal.SIGINT:
            raise KeyboardInterrupt from None
        sys.exit(EXIT_REQUEUE)
    if training.data.stage is not None:
        say(f"staged in {training.data.stage}")
    conclude(cfg, training)


def conclude(cfg: DictConfig, training: Training) -> None:
    """What a trained run leaves: its section of report.json, W&B's table and picture, and the line that counts."""
    if not training.trainer.is_global_zero:
        return
    run_dir = Path(cfg.run_dir)
    best = load_heads(find_checkpoint(run_dir / "checkpoints", "best"))
    metrics = best.record["metrics"]
    update_report(
        run_dir,
        "train",
        {"checkpoint": str(best.path), "positions": training.data.windows.num_positions, "metrics": metrics},
    )
    for logger in training.trainer.loggers:
        if isinstance(logger, WandbRun):
            logger.log_heads(metrics, best.record["step"])
            logger.finish()
    tree, chain = metrics["heldout/acceptance_tree"], metrics["heldout/acceptance_chain"]
    pays, speed = metrics["break_even"], metrics["heldout/tokens_per_s"]
    print(
        f"acceptance length on held-out text {tree:.3f} (tree of {metrics['num_nodes']} nodes, "
        f"{'above' if tree > pays else 'below'} the break-even of {pays:.2f} on {cfg.hardware.name}: "
        f"{speed:.1f} tokens/s expected, {speed * pays / tree:.1f} without), {chain:.3f} (chain); "
        f"best checkpoint: {best.path}"
    )


def how_it_ended(cfg: DictConfig, record: Mapping[str, Any]) -> str | None:
    """For the user, by the record of a run's last checkpoint; None where there is more to train."""
    step = record["step"]
    if step >= cfg.trainer.max_steps:
        return f"is trained to step {step} already; raise trainer.max_steps to go on"
    # older versions did not count
    if waited_enough(record.get("validations_since_best", 0), cfg.patience):
        return f"ended early, at step {step} of {cfg.trainer.max_steps}; raise patience to go on"
    return None


def started_by_rank_zero(trainer: L.Trainer) -> bool:
    """Whether this is a process that Lightning itself has started, not torchrun or Slurm."""
    strategy = trainer.strategy
    ours = isinstance(strategy, DDPStrategy) and isinstance(strategy.cluster_environment, LightningEnvironment)
    return ours and not trainer.is_global_zero


def owner_of_inputs(cfg: DictConfig) -> Path | None:
    """The folder that conversations and cache lie in, of this run or of a whole study; None where they come from
    elsewhere."""
    folder = Path(cfg.cache).parent
    ours = folder in (Path(cfg.run_dir), *Path(cfg.run_dir).parents)
    return folder if ours and cfg.conversations and Path(cfg.conversations).parent == folder else None


def make_inputs(cfg: DictConfig, target: Target) -> None:
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        raise ValueError("the inputs are missing: run medusa_k25.generate and medusa_k25.capture before several ranks")
    from medusa_k25.capture import capture
    from medusa_k25.generate import generate

    if (owner := owner_of_inputs(cfg)) is not None:
        cfg = cfg.copy()
        cfg.run_dir = str(owner)  # which gets the reports on them
    print(f"no whole cache at {cfg.cache}: making it first, from the target's own answers (generate, then capture)")
    generate(cfg, target)
    capture(cfg, target)


def build(cfg: DictConfig, target: Target, cache: Cache, last: Path | None = None) -> Training:
    """All objects of a training run, and the arithmetic that it depends on. `last`: the checkpoint to go on from."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # what a run needs to know, its summary says
    # the states are read faster than they are used, see bench/cache_reader.py
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning 2.6 with torch 2.13
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    for key in ("max_steps", "val_check_interval", "accumulate_grad_batches", "log_every_n_steps", "num_nodes"):
        if not isinstance(cfg.trainer[key], int) or cfg.trainer[key] < 1:
            raise ValueError(f"trainer.{key}={cfg.trainer[key]}: expected a whole number, at least 1")
    if cfg.patience is not None and (not isinstance(cfg.patience, int) or cfg.patience < 1):
        raise ValueError(f"patience={cfg.patience}: expected a number of validations, at least 1, or null")
    L.seed_everything(cfg.seed, verbose=False)
    loss = instantiate(cfg.loss)
    counts_V = token_counts(cache, in_share(documents_of(cache, "train"), cfg.data.share))
    vocabulary = DraftVocabulary.most_frequent(counts_V, cfg.draft_vocab_size)
    new_heads = partial(instantiate(cfg.heads), hidden_size=target.hidden_size, draft_vocab_size=len(vocabulary))
    with torch.device("meta"):  # sizes without memory: what cannot fit must not be tried
        sizes = new_heads()
    loss.weights(sizes.num_heads)  # refuses another number of heads now rather than in the first step
    data: MedusaData = instantiate(cfg.data)(
        cache=cache,
        num_heads=sizes.num_heads,
        draftable_V=vocabulary.to_draft(torch.arange(target.vocab_size)) != IGNORE,
        teacher_states=loss.needs_teacher,
    )
    devices, device = device_count(cfg.trainer), own_device(cfg.trainer)
    data.refuse_idle_ranks(devices * cfg.trainer.num_nodes)
    cost = cost_of(cfg, sizes, len(vocabulary), target.vocab_size, loss.needs_teacher, data, devices, device)
    refuse_what_cannot_fit(cost, Path(cfg.run_dir), device, devices)

    passes = CycleModel.on(instantiate(cfg.hardware), target.path)
    cycle_ms = passes.heads_ms(sizes, len(vocabulary), cfg.num_nodes)

    lm_head_MD = vocabulary.rows(target.lm_head)
    heads = new_heads()
    heads.init_lm_heads(lm_head_MD)
    if cfg.warm_start is not None and last is None:
        say(warm_start(heads, vocabulary, Path(cfg.warm_start), cfg.warm_start_min_match, target.identity))
    dtype = torch.float32 if str(cfg.trainer.precision).startswith("32") else torch.bfloat16
    module = MedusaModule(
        heads,
        vocabulary,
        lm_head_MD.to(dtype),
        None if heads.reads == "state" else Embeddings(target.embeddings.to(dtype)),
        loss,
        instantiate(cfg.optimizer),
        instantiate(cfg.schedule),
        cycle_ms,
        passes.baseline_tok_s(context=passes.usual_context),
        cfg.max_width,
        cfg.trainer.log_every_n_steps,
    )
    record = {
        "target": target.identity,
        "cache_fingerprint": cache.fingerprint,
        "code_version": __version__,
        "config": OmegaConf.to_container(cfg, resolve=True),
    }
    checkpoints = Checkpoints(Path(cfg.run_dir) / "checkpoints", data, record, cfg.patience)
    peak = peak_flops(device, matmul_dtype(torch.empty(0, dtype=dtype, device=device)))
    strategy = instantiate(cfg.strategy)(
        devices=devices,
        num_nodes=cfg.trainer.num_nodes,
        micro_batch=cfg.data.batch_size,
        resume_world_size=None if last is None else read_record(last)["world_size"],
    )
    by_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    trainer = instantiate(
        cfg.trainer,
        devices=devices,
        strategy=strategy,
        val_check_interval=cfg.trainer.val_check_interval * cfg.trainer.accumulate_grad_batches,  # Lightning's unit
        logger=instantiate(cfg.logger),
        plugins=[SLURMEnvironment(auto_requeue=False)] if by_slurm else [],  # we end with a status for that
        callbacks=[Progress(cost.flops_per_position, peak), checkpoints],
        enable_progress_bar=False,  # our own Progress
        default_root_dir=cfg.run_dir,
        enable_checkpointing=False,  # and Checkpoints
    )
    coverage = {
        "training": vocabulary.coverage(counts_V),
        "calibration": vocabulary.coverage(token_counts(cache, data.documents["calibration"])),
    }
    summary = "\n".join(
        [
            summarise(cfg, target, heads, data, cost, peak, coverage),
            serving_line(passes, cycle_ms, target),
            drafting_line(passes, heads, len(vocabulary), cfg.num_nodes or COMPARED_NODES[0]),
        ]
    )
    return Training(module, data, trainer, cost, record, summary)


def serving_line(passes: CycleModel, cycle_ms: Mapping[int, float], target: Target) -> str:
    """What the heads have to reach, for the run's summary."""
    machine, baseline = passes.hardware, passes.baseline_tok_s(context=passes.usual_context)
    shown = ", ".join(
        f"{nodes} nodes {ms:.1f} ms ({ms * baseline / 1000:.2f})"
        for nodes, ms in cycle_ms.items()
        if nodes in SHOWN_SIZES or len(cycle_ms) == 1
    )
    whose = (
        "" if machine.is_of(target.name) else f", of {machine.target}: what they say of {target.name} is a rehearsal"
    )
    return (
        f"serving     passes on {machine.name}{whose}: {baseline:.1f} tokens/s without speculation; {shown} "
        "(acceptance length from which on it pays)"
    )


def drafting_line(passes: CycleModel, heads: Heads, draft_vocab_size: int, nodes: int) -> str:
    """What the heads cost before a pass, for the run's summary."""
    pass_ms = passes.cycle(nodes, context=passes.usual_context).ms
    return f"drafting    {passes.drafting(heads, draft_vocab_size, nodes).text(pass_ms)}"


if __name__ == "__main__":
    main()
