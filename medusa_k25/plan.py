"""What a run takes before it is made: disk, memory, hours, money, on one machine and on an alternative.

python -m medusa_k25.plan +exp=k25_4heads hardware=rtx_pro_6000_x8 [alternative=b200_nvl8] [conversations=FILE]
                          [calibrate=true] [pilot=[runs/a,runs/b,runs/c]]

Needs no checkpoint, no cache and no GPU. conversations: count its tokens rather than assume them. calibrate: time a
training step on this machine, which is to be the one that `hardware` describes. pilot: runs on shares of the data
(data.share), whose learning curve says what all of it would give.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from medusa_k25.chat import ChatMarks
from medusa_k25.config import ConfigError, conf_dir, verb
from medusa_k25.costs.calibration import timed_positions_per_s
from medusa_k25.costs.hardware import Hardware
from medusa_k25.costs.learning_curve import Measured, fit_curve
from medusa_k25.costs.planning import (
    Dataset,
    Split,
    Way,
    compared_types,
    estimate,
    heads_break_even,
    planned_run,
    recommendation,
    ways,
)
from medusa_k25.costs.served import KIMI_K25, Served
from medusa_k25.costs.training import TrainingCost, peak_flops
from medusa_k25.costs.verdict import SHOWN_SIZES
from medusa_k25.data.texts import Text, holds_messages, texts_of_conversations
from medusa_k25.reports.plan import Pilot, Plan, markdown, text
from medusa_k25.reports.report import read_report, update_report
from medusa_k25.target import end_ids_of, load_tokenizer
from medusa_k25.target_builders import find_checkpoint, kimi_k25

CALIBRATION_S = 5.0
LEAST_POSITIONS = 64


@verb("plan", "hardware", "heads", "loss", "optimizer")
def main(cfg: DictConfig) -> None:
    hardware: Hardware = instantiate(cfg.hardware)
    alternative = None if cfg.alternative is None else other_hardware(cfg.alternative, hardware)
    assumptions = instantiate(cfg.plan)
    served = served_of(cfg.target)
    data = assumptions.dataset(counted(cfg))
    target = cfg.target._target_.rpartition(".")[2]
    machines = [hardware, *([] if alternative is None else [alternative])]
    costs = {machine.name: cost_on(machine, cfg, served, data) for machine in machines}
    own_cost = costs[hardware.name]
    measured = calibrated(cfg, own_cost, hardware) if cfg.calibrate else None
    positions_a_step = own_cost.N * own_cost.world_size * cfg.trainer.accumulate_grad_batches
    most_answers = cfg.trainer.get("limit_val_batches")
    run = planned_run(
        data,
        cfg.trainer.max_steps,
        positions_a_step,
        cfg.trainer.val_check_interval,
        None if most_answers is None else most_answers * own_cost.world_size,
        cfg.evaluate.most_tokens,
    )
    storage, dtype = cfg.capture.storage, cfg.capture.storage_dtype
    own = estimate(hardware, own_cost, data, run, dtype, measured, cfg.trainer.num_nodes)
    rented, shared, advice = None, tuple[Way, ...](), None
    if alternative is not None:
        rented = estimate(alternative, costs[alternative.name], data, run, dtype, machines=cfg.trainer.num_nodes)
        shared = tuple(ways(own, rented, data, served, assumptions, storage, dtype))
        advice = recommendation(shared, own, rented, assumptions)
    sizes = sorted({*SHOWN_SIZES} | ({cfg.num_nodes} - {None}))
    serving = {
        machine.name: [heads_break_even(machine, served, costs[machine.name], nodes) for nodes in sizes]
        for machine in machines
        if machine.is_of(target)
    }
    plan = Plan(
        name=cfg.name,
        experiment=experiment(),
        target=target,
        served=served,
        data=data,
        assumptions=assumptions,
        storage=storage,
        dtype=dtype,
        run=run,
        positions_a_step=positions_a_step,
        num_nodes=cfg.num_nodes,
        own=own,
        rented=rented,
        ways=shared,
        advice=advice,
        serving={name: {one.nodes: one for one, _ in found} for name, found in serving.items()},
        cycle_assumptions={
            name: tuple(dict.fromkeys(what for _, assumed in found for what in assumed))
            for name, found in serving.items()
        },
        types=compared_types(own, served, data, run, dtype) if hardware.is_of(target) else (),
        pilot=pilot_of([Path(folder) for folder in cfg.pilot], hardware, served, own_cost) if cfg.pilot else None,
        settings=settings(cfg),
    )
    print(text(plan))
    run_dir = Path(cfg.run_dir)
    update_report(run_dir, "plan", plan.as_json())
    file = run_dir / "plan.md"
    file.write_text(markdown(plan))
    print(f"\nwrote {file}")


def other_hardware(name: str, hardware: Hardware) -> Hardware:
    """The machine called `name` in conf/hardware, or in --config-dir."""
    folders = [conf_dir()]
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        folders += [Path(source.path) for source in sources if source.schema == "file"]
    files = {file.stem: file for folder in folders for file in sorted((folder / "hardware").glob("*.yaml"))}
    if name not in files:
        near = get_close_matches(name, files, 1)
        raise ConfigError(
            f"alternative={name}: conf/hardware has no '{name}'"
            + (f"; did you mean '{near[0]}'?" if near else "")
            + f" (it has {', '.join(files)})"
        )
    node = OmegaConf.load(files[name])
    if "_target_" not in node:
        raise ConfigError(f"{files[name]} describes no machine; see conf/hardware for what does")
    other: Hardware = instantiate(node)
    if other.name == hardware.name:
        raise ConfigError(f"alternative={name} is the machine that hardware= names; name another one, or none")
    return other


def served_of(target: DictConfig) -> Served:
    """The target's sizes, from the config.json of its checkpoint; Kimi-K2.5's are known without one."""
    kind = target._target_.rpartition(".")[2]
    if kind == "kimi_k25":
        try:
            folder = find_checkpoint(target.path)
        except ValueError as error:
            if target.path != inspect.signature(kimi_k25).parameters["path"].default:  # one that was named
                print(
                    f"WARNING: target.path={target.path} is not there ({error}): planned with Kimi-K2.5's known sizes"
                )
            return KIMI_K25
    else:
        folder = instantiate(target).path
    return Served.of_config(json.loads((folder / "config.json").read_text()))


def counted(cfg: DictConfig) -> Dataset | None:
    """What the conversations hold; None where the run has none yet."""
    if cfg.conversations is None:
        return None
    file = Path(cfg.conversations)
    if not file.exists() and file == Path(cfg.run_dir) / "conversations.jsonl":
        return None
    marks = None
    if cfg.tokenizer is not None and holds_messages(file):
        folder = Path(cfg.tokenizer)
        tokenizer = load_tokenizer(folder, cfg.target.get("trust_remote_code", False))
        marks = ChatMarks.read(tokenizer, end_ids_of(folder, tokenizer), folder)
    texts = texts_of_conversations(file, marks)

    def split(found: list[Text]) -> Split:
        return Split(len(found), sum(one.num_states for one in found))

    every = [one for some in texts.values() for one in some]
    if not every:
        raise ValueError(f"{file} holds no answer of at least two tokens; there is nothing to count")
    answers = [len(one.answer_T) for one in every]
    prompts = sum(one.start - read for one, read in zip(every, read_before(every), strict=True))
    return Dataset(
        samples=len(every),
        prompt_tokens=prompts,
        answer_tokens=sum(answers),
        longest_answer=max(answers),
        train=split(texts["train"]),
        calibration=split(texts["calibration"]),
        heldout=split(texts["heldout"]),
        source=f"counted in {file}",
    )


def read_before(texts: list[Text]) -> Iterator[int]:
    """Of the tokens before each answer those that an earlier answer of the same conversation ends at: stored once."""
    stop, document = 0, None
    for one in texts:
        yield stop if one.document == document and one.start >= stop else 0
        stop, document = len(one.ids_T), one.document


def cost_on(hardware: Hardware, cfg: DictConfig, served: Served, data: Dataset) -> TrainingCost:
    """The experiment's heads on all devices of `hardware`."""
    loss = instantiate(cfg.loss)
    vocabulary = cfg.draft_vocab_size or served.vocab_size
    with torch.device("meta"):
        heads = instantiate(cfg.heads)(hidden_size=served.hidden_size, draft_vocab_size=vocabulary)
    return TrainingCost(
        heads,
        N=cfg.data.batch_size * cfg.data.window,
        M=vocabulary,
        V=served.vocab_size,
        teacher=loss.needs_teacher,
        strategy=cfg.strategy.name,
        world_size=max(hardware.gpus, 1) * cfg.trainer.num_nodes,
        low_precision=not str(cfg.trainer.precision).startswith("32"),
        device_type="cuda" if hardware.gpus else "cpu",
        longest_answer=data.longest_answer,
    )


def calibrated(
    cfg: DictConfig, cost: TrainingCost, hardware: Hardware, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Positions/s of all ranks, from steps on one device here: as large a micro-batch as it can do in a few seconds."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if hardware.gpu not in here:
        raise ValueError(
            f"calibrate=true times this machine (GPU: {here}), but hardware {hardware.name} has GPU: {hardware.gpu}; "
            "choose the hardware file of this machine, or calibrate on that one"
        )
    device = torch.device(cost.device_type)
    available = torch.cuda.mem_get_info()[0] if hardware.gpus else psutil.virtual_memory().available
    speed = peak_flops(device, torch.bfloat16 if cost.low_precision else torch.float32)
    small = replace(cost, world_size=1, strategy="ddp")
    while small.N > LEAST_POSITIONS and (
        small.memory_bytes > available or small.N * small.flops_per_position > speed * CALIBRATION_S
    ):
        small = replace(small, N=small.N // 2)
    if small.memory_bytes > available:
        raise ValueError(
            f"calibrate=true: even {small.N} positions need {small.memory_bytes / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are free; calibrate on the machine itself, or a smaller draft_vocab_size"
        )
    heads = instantiate(cfg.heads)(hidden_size=cost.D, draft_vocab_size=cost.M)
    loss, optimizer = instantiate(cfg.loss), instantiate(cfg.optimizer)
    one = timed_positions_per_s(
        heads, cost.M, loss, optimizer, small.N, device, cost.low_precision, CALIBRATION_S, clock
    )
    return one * cost.world_size


def pilot_of(runs: list[Path], hardware: Hardware, served: Served, cost: TrainingCost) -> Pilot:
    """The learning curve through the best checkpoints of `runs`, whose trees were chosen for `hardware`."""
    found, caches = [], set()
    for run in runs:
        trained = read_report(run).get("train")
        if trained is None or "positions" not in trained:
            raise ValueError(f"pilot: {run} is no trained run; expected its report.json, as `train` leaves it")
        if "heldout/speedup" not in trained.get("metrics", {}) or not (run / "config.yaml").is_file():
            raise ValueError(f"pilot: {run} has no config.yaml or no validated speed, as `train` leaves them")
        config = OmegaConf.load(run / "config.yaml")
        chosen_for = config.hardware.name
        if chosen_for != hardware.name:
            raise ValueError(f"pilot: {run} chose its tree for hardware={chosen_for}, this plan is for {hardware.name}")
        caches.add(config.cache)
        found.append((trained["positions"], trained["metrics"]))
    if len(caches) > 1:
        raise ValueError(
            f"pilot: runs on {', '.join(sorted(caches))} are judged on different text; train all of them on one cache, "
            "with another data.share= each"
        )
    found.sort(key=lambda one: one[0])
    lengths = tuple(metrics["heldout/acceptance_tree"] for _, metrics in found)
    points = [Measured(positions, metrics["heldout/speedup"]) for positions, metrics in found]
    most = max((cost.K + 1) * point.value / length for point, length in zip(points, lengths, strict=True))
    pays, _ = heads_break_even(hardware, served, cost, int(found[-1][1]["num_nodes"]))
    return Pilot(tuple(str(run) for run in runs), lengths, fit_curve(points, most), pays)


def experiment() -> str | None:
    """The name after +exp=."""
    return HydraConfig.get().runtime.choices.get("exp") if HydraConfig.initialized() else None


def settings(cfg: DictConfig) -> dict[str, Any]:
    """What the training is set to, for people who read the plan."""
    names: tuple[str, ...] = (
        "draft_vocab_size",
        "num_nodes",
        "data.window",
        "data.batch_size",
        "optimizer.lr",
        "trainer.precision",
    )
    names += ("trainer.max_steps", "trainer.accumulate_grad_batches", "trainer.num_nodes", "strategy.name")
    return {name: OmegaConf.select(cfg, name) for name in names}


if __name__ == "__main__":
    main()
