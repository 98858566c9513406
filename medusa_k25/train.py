"""Train heads on a cache: python -m medusa_k25.train [+exp=NAME] [key=value ...]

Letters: D hidden, V vocabulary, M draft vocabulary, K heads.
"""

import logging
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from medusa_k25 import __version__
from medusa_k25.cache import Cache
from medusa_k25.callbacks import Checkpoints, MetricsTable, Progress, Stopped
from medusa_k25.checkpoint import complete_checkpoints, find_checkpoint, load_heads, read_record
from medusa_k25.config import EXIT_REQUEUE, verb
from medusa_k25.data.datamodule import MedusaData
from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import documents_of, token_counts
from medusa_k25.heads import DraftVocabulary
from medusa_k25.module import MedusaModule
from medusa_k25.report import read_report, update_report
from medusa_k25.target import Target

say = rank_zero_only(print)


@dataclass(frozen=True)
class Training:
    module: MedusaModule
    data: MedusaData
    trainer: L.Trainer
    checkpoints: Checkpoints
    summary: str


@verb("target", "data", "heads", "loss", "optimizer", "schedule", "trainer", "strategy", "logger")
def main(cfg: DictConfig) -> None:
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


def make_inputs(cfg: DictConfig, target: Target) -> None:
    if int(os.environ.get("LOCAL_RANK", 0)):
        raise ValueError("the inputs are missing: run medusa_k25.generate and medusa_k25.capture before several ranks")
    from medusa_k25.capture import capture
    from medusa_k25.generate import generate

    print(f"no whole cache at {cfg.cache}: making it first, from the target's own answers (generate, then capture)")
    generate(cfg, target)
    capture(cfg, target)


# A run may be prolonged, go on with other ranks, and log or load otherwise; the other verbs have keys of their own
FREE = ("trainer.max_steps", "trainer.devices", "trainer.num_nodes", "trainer.accumulate_grad_batches")
FREE += ("trainer.log_every_n_steps", "data.batch_size", "data.num_workers", "logger")
FREE += ("checkpoint", "evaluate", "export_dir", "export_dtype", "tree", "decode_prompts")


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
    """What makes a run that run: all keys of a config.yaml but the FREE ones, and its first line."""
    config = flat(OmegaConf.to_container(OmegaConf.create(text)))
    return {"made with": text.partition("\n")[0]} | {
        key: value for key, value in config.items() if not any(f"{key}.".startswith(f"{free}.") for free in FREE)
    }


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
    L.seed_everything(cfg.seed, verbose=False)
    heads = instantiate(cfg.heads)(hidden_size=target.hidden_size)
    loss = instantiate(cfg.loss)
    counts_V = token_counts(cache, documents_of(cache, "train"))
    vocabulary = DraftVocabulary.most_frequent(counts_V, cfg.draft_vocab_size)
    data: MedusaData = instantiate(cfg.data)(
        cache=cache,
        num_heads=heads.num_heads,
        draftable_V=vocabulary.to_draft(torch.arange(target.vocab_size)) != IGNORE,
        teacher_states=False,
    )
    dtype = torch.float32 if str(cfg.trainer.precision).startswith("32") else torch.bfloat16
    module = MedusaModule(
        heads,
        vocabulary,
        vocabulary.rows(target.lm_head).to(dtype),
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
        callbacks=[checkpoints, Progress()],
        enable_progress_bar=False,  # our own Progress
        default_root_dir=cfg.run_dir,
        enable_checkpointing=False,  # and Checkpoints
    )
    coverage = {
        "training": vocabulary.coverage(counts_V),
        "calibration": vocabulary.coverage(token_counts(cache, data.documents["calibration"])),
    }
    return Training(module, data, trainer, checkpoints, summarise(cfg, target, module, data, devices, coverage))


def device_count(trainer: Any) -> int:
    """Devices a node: `auto` is every GPU, or one CPU process."""
    if trainer.devices == "auto":
        return max(1, torch.cuda.device_count()) if trainer.accelerator in ("auto", "gpu", "cuda") else 1
    return int(trainer.devices)


def summarise(
    cfg: DictConfig, target: Target, module: MedusaModule, data: MedusaData, devices: int, coverage: dict[str, float]
) -> str:
    ranks = devices * cfg.trainer.num_nodes
    accumulate = cfg.trainer.accumulate_grad_batches
    windows_a_step = cfg.data.batch_size * ranks * accumulate
    positions_a_step = windows_a_step * cfg.data.window
    steps_an_epoch = len(data.windows) / windows_a_step
    parameters = sum(parameter.numel() for parameter in module.heads.parameters())
    documents = {split: len(documents) for split, documents in data.documents.items()}
    M, D = module.lm_head_MD.shape
    states_GB = data.cache.num_states * D * data.cache.storage_dtype.itemsize / 1e9
    heads = f"{module.heads.num_heads} x {type(module.heads).__name__}"
    return "\n".join(
        [
            f"target      {target.name}: D={D:,}, V={target.vocab_size:,}",
            f"cache       {data.cache.path}: {data.cache.num_tokens:,} tokens, {data.cache.num_states:,} states in "
            f"{states_GB:.2f} GB; documents: {', '.join(f'{count} {split}' for split, count in documents.items())}",
            f"heads       {heads}: {parameters / 1e6:.2f} M parameters, "
            f"{parameters * 16 / 1e6:,.0f} MB with gradients and AdamW in fp32",
            f"vocabulary  {M:,} of {target.vocab_size:,} tokens: "
            f"{', '.join(f'{share:.1%} of the {text} text' for text, share in coverage.items())}; "
            f"frozen lm_head {module.lm_head_MD.nbytes / 1e6:.0f} MB",
            f"step        {cfg.data.batch_size} windows x {cfg.data.window} positions x {ranks} ranks x {accumulate} "
            f"accumulated = {positions_a_step:,} positions",
            f"run         {cfg.trainer.max_steps} steps, {steps_an_epoch:.1f} an epoch: "
            f"{cfg.trainer.max_steps / steps_an_epoch:.1f} epochs of {data.windows.num_positions:,} positions",
        ]
    )


if __name__ == "__main__":
    main()
