"""What do which heads accept? python -m medusa_k25.study +exp=study [reference=DESIGN]

Reads the runs runs/study/*/ that `python -m medusa_k25.train --multirun +exp=study` has trained (with name=NAME, those
of another study), replays each one's best checkpoint on the held-out text of their cache, and says what each design
accepts, with intervals over seeds and documents: a table, study.html, pictures, and report.json for scripts. Runs that
differ in the seed only are one design, which is named after their folders. Runs that are not finished are left out; the
command may be given again at any time, and replays what is new.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from medusa_k25.acceptance import BOTH, BOTH_ANSWERS, CHAIN, TREE, Evaluator, HeadsTree, Replayed, accuracy, ranks_of
from medusa_k25.cache import Cache
from medusa_k25.chat import think_ids_of
from medusa_k25.checkpoint import (
    HeadsCheckpoint,
    complete_checkpoints,
    find_checkpoint,
    load_heads,
    read_record,
    step_of,
    waited_enough,
)
from medusa_k25.config import PROLONGS, verb
from medusa_k25.conversations import default_device
from medusa_k25.data.splits import SPLITS
from medusa_k25.data.texts import Text, texts_of_cache
from medusa_k25.designs import Key, Measured, cells, drafting_flops, measure, parts_of
from medusa_k25.heads import HEADS
from medusa_k25.preflight import facts
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.reports.study import BESIDE_SIZES, TREE_SIZES, tables_as_text, write_study_page
from medusa_k25.target import Target

SEED_KEYS = {"seed", "data.seed"}
USUAL_REFERENCE = "residual"


@dataclass(frozen=True)
class Run:
    """A finished run of a study. facts: its identity without the seed. positions: that it learns from."""

    folder: Path
    seed: int
    share: float
    steps: int
    facts: dict[str, Any]
    positions: int

    @property
    def design(self) -> str:
        """The folder's name without the seed at its end."""
        return self.folder.name.removesuffix(f"-{self.seed}")

    @classmethod
    def read(cls, folder: Path) -> "Run | None":
        """None for one that is not finished."""
        text, report = (folder / "config.yaml").read_text(), read_report(folder)
        config = OmegaConf.create(text)
        checkpoints = folder / "checkpoints"
        paths = complete_checkpoints(checkpoints)
        if "train" not in report or not paths:
            return None
        since_best = read_record(paths[-1]).get("validations_since_best", 0)
        if step_of(paths[-1]) < config.trainer.max_steps and not waited_enough(since_best, config.patience):
            return None
        known = {key: value for key, value in facts(text).items() if key not in SEED_KEYS}
        return cls(
            folder,
            config.seed,
            config.data.share,
            config.trainer.max_steps,
            known | {key: OmegaConf.select(config, key) for key in PROLONGS},
            report["train"]["positions"],
        )


@dataclass(frozen=True)
class Replay:
    """What was measured of a run. accuracy_K: top-1, of held-out labels. flops: of drafting, by predictor and nodes."""

    measured: Mapping[Key, Measured]
    accuracy_K: list[float]
    flops: Mapping[tuple[str, int], int]
    kind: str
    parameters: int


@verb("target", "evaluate")
def main(cfg: DictConfig) -> None:
    folder = Path(cfg.run_dir)
    designs, unfinished = designs_in(folder)
    reference = reference_of(cfg.reference, list(designs))
    target = instantiate(cfg.target)
    cache = Cache.open(Path(cfg.cache), target)
    think_ids = think_ids_of(target.load_tokenizer())
    texts = {split: texts_of_cache(cache, split, think_ids) for split in SPLITS}
    evaluator: Evaluator = instantiate(
        cfg.evaluate, num_nodes=[*cfg.evaluate.num_nodes, *TREE_SIZES, *BESIDE_SIZES], judged_nodes=None
    )
    replayed = evaluator.replayed(texts)
    parts = parts_of(replayed.heldout)
    print(
        f"{sum(map(len, designs.values()))} runs of {len(designs)} designs in {folder}"
        + (f"; not finished, left out: {', '.join(unfinished)}" if unfinished else "")
        + f"\nheld-out text: {len(replayed.heldout):,} answers, "
        + ", ".join(f"{int(part_I.sum()):,} {part}" for part, part_I in list(parts.items())[1:])
    )
    largest_first = sorted(TREE_SIZES, reverse=True)  # what was found in a corpus serves all smaller sizes
    free = {
        predictor.name: cells([measure(replayed, parts, predictor, largest_first)])
        for predictor in tqdm(evaluator.predictors(texts["train"], replayed), desc="without training", leave=False)
    }
    runs = [run for some in designs.values() for run in some]
    replays = {
        run.folder: replay_run(run, target, cache, evaluator, texts["train"], replayed, parts)
        for run in tqdm(runs, desc="replay", unit="run", leave=False)
    }

    def measured(design: str) -> list[Mapping[Key, Measured]]:
        return [replays[run.folder].measured for run in designs[design]]

    section = {
        "cache_fingerprint": cache.fingerprint,
        "target": target.name,
        "answers": len(replayed.heldout),
        "topics": sorted({text.group for text in replayed.heldout if text.group is not None}),
        "parts": {part: int(part_I.sum()) for part, part_I in parts.items()},
        "reference": reference,
        "unfinished": unfinished,
        "designs": [
            described(name, some, [replays[run.folder] for run in some])
            | {
                "cells": [
                    cell.as_json() for cell in cells(measured(name), None if name == reference else measured(reference))
                ]
            }
            for name, some in designs.items()
        ],
        "training_free": [{"name": name, "cells": [cell.as_json() for cell in some]} for name, some in free.items()],
    }
    print(f"\n{tables_as_text(section)}")
    update_report(folder, "study", section)
    print(f"\nwrote {folder / 'report.json'} and {write_study_page(folder)}")


def designs_in(folder: Path) -> tuple[dict[str, list[Run]], list[str]]:
    """The finished runs below a study's folder by design, in the order of HEADS and seeds; and the others' names."""
    designs: dict[str, list[Run]] = {}
    unfinished = []
    for config in sorted(folder.glob("*/config.yaml")):
        run = Run.read(config.parent)
        if run is None:
            unfinished.append(config.parent.name)
        else:
            designs.setdefault(run.design, []).append(run)
    if not designs:
        raise ValueError(
            f"no finished run in {folder}/*/; `python -m medusa_k25.train --multirun +exp=study` trains them, "
            "or name another study with name="
        )
    order = list(HEADS)

    def place(design: str) -> tuple[int, float, str]:
        heads = design.partition("-")[0]
        return order.index(heads) if heads in order else len(order), designs[design][0].share, design

    designs = {design: designs[design] for design in sorted(designs, key=place)}
    for runs in designs.values():
        runs.sort(key=lambda run: run.seed)
        for run in runs[1:]:
            keys = [key for key in {**run.facts, **runs[0].facts} if run.facts.get(key) != runs[0].facts.get(key)]
            if keys:
                raise ValueError(
                    f"{run.folder} and {runs[0].folder} are named as one design, but differ in {', '.join(keys[:5])}; "
                    "rename one (DESIGN-SEED)"
                )
    return designs, unfinished


def reference_of(wanted: str | None, designs: Sequence[str]) -> str:
    if wanted is None:
        return USUAL_REFERENCE if USUAL_REFERENCE in designs else designs[0]  # in the order of HEADS
    if wanted not in designs:
        raise ValueError(f"reference={wanted}: there is no such design; there is {', '.join(designs)}")
    return wanted


def replay_run(
    run: Run,
    target: Target,
    cache: Cache,
    evaluator: Evaluator,
    train: Sequence[Text],
    replayed: Replayed,
    parts: Mapping[str, Tensor],
) -> Replay:
    checkpoint = load_heads(find_checkpoint(run.folder / "checkpoints", "best"))
    checkpoint.refuse_other_target(target)
    cache.refuse_other(checkpoint.record["cache_fingerprint"], str(checkpoint.path))
    ranks = kept_ranks(checkpoint, target, cache, replayed)
    measured: dict[Key, Measured] = {}
    flops: dict[tuple[str, int], int] = {}
    for predictor in evaluator.predictors(train, replayed, ranks):  # what needs no heads is measured once for all runs
        if predictor.name in (CHAIN, TREE, BOTH, BOTH_ANSWERS):
            beside = predictor.name in (BOTH, BOTH_ANSWERS)
            sizes = [n for n in evaluator.sizes(predictor) if not beside or n in BESIDE_SIZES]
            measured |= measure(replayed, parts, predictor, sizes)
            if isinstance(predictor, HeadsTree):
                M = len(checkpoint.vocabulary)
                flops |= {(predictor.name, n): drafting_flops(checkpoint.heads, M, predictor.tree(n)) for n in sizes}
    hits_K1, labels_K = accuracy(ranks, replayed.heldout, [1])
    return Replay(
        measured,
        (hits_K1[:, 0] / labels_K.clamp(min=1)).tolist(),
        flops,
        checkpoint.record["heads"]["type"],
        sum(parameter.numel() for parameter in checkpoint.heads.parameters()),
    )


def kept_ranks(checkpoint: HeadsCheckpoint, target: Target, cache: Cache, replayed: Replayed) -> dict[Text, Tensor]:
    """`ranks_of` the replayed text; kept beside the checkpoint, because computing them takes longer than all else."""
    file = checkpoint.path / "ranks.safetensors"
    texts = [*replayed.calibration, *replayed.heldout]
    made_from = {"cache": cache.fingerprint, "answers": str(len(texts))}
    states = [text.num_states for text in texts]
    if file.exists():
        with safe_open(file, "pt") as kept:
            if kept.metadata() == made_from and len(ranks_NK := kept.get_tensor("ranks_NK")) == sum(states):
                return dict(zip(texts, ranks_NK.split(states), strict=True))
    speculator = checkpoint.speculator(target, default_device())
    ranks = ranks_of(speculator, cache, {"calibration": replayed.calibration, "heldout": replayed.heldout})
    part = file.with_suffix(".part")
    save_file({"ranks_NK": torch.cat([ranks[text] for text in texts])}, part, made_from)
    part.rename(file)
    return ranks


def described(name: str, runs: Sequence[Run], replays: Sequence[Replay]) -> dict[str, Any]:
    """What a design is and costs: means over its runs, whose trees and accuracies differ."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    sizes = [key for key in replays[0].flops if all(key in replay.flops for replay in replays)]
    return {
        "name": name,
        "heads": replays[0].kind,
        "seeds": [run.seed for run in runs],
        "share": runs[0].share,
        "positions": runs[0].positions,
        "steps": runs[0].steps,
        "parameters": replays[0].parameters,
        "top1": [mean(values) for values in zip(*(replay.accuracy_K for replay in replays), strict=True)],
        "drafting_mflop": [
            [predictor, nodes, mean([replay.flops[predictor, nodes] for replay in replays]) / 1e6]
            for predictor, nodes in sizes
        ],
    }


if __name__ == "__main__":
    main()
