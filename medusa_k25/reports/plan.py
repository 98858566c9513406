"""A plan as tables for the terminal, as Markdown to commit, and as plain numbers.

The sections are the same: a title, a table, and what to say under it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from medusa_k25.costs.cycle import COMPARED_NODES, BreakEven
from medusa_k25.costs.hardware import Figure, Hardware
from medusa_k25.costs.learning_curve import Curve
from medusa_k25.costs.planning import (
    CONVERSATION_BYTES,
    NETWORK_SHARE,
    Assumptions,
    Dataset,
    Estimate,
    Run,
    TypePlan,
    Way,
    cache_bytes,
    duration,
)
from medusa_k25.costs.served import Served

STORED = (("all", "bfloat16"), ("answers", "bfloat16"), ("all", "float8_e4m3fn"), ("answers", "float8_e4m3fn"))
SMALLER_VOCABULARY = 32_768
MANY_EPOCHS = 10


@dataclass(frozen=True)
class Pilot:
    """Runs on shares of the data, with the tree that is fastest on the own machine. curve: of their speed against no
    speculation there. break_even: of a pass as large as that of the run with the most data."""

    runs: tuple[str, ...]
    lengths: tuple[float, ...]
    curve: Curve
    break_even: BreakEven

    @property
    def pays(self) -> tuple[float, float]:
        """The speed from which on the heads pay: 1, as well as the cycle is known."""
        return self.break_even.low / self.break_even.length, self.break_even.high / self.break_even.length


@dataclass(frozen=True)
class Plan:
    name: str
    experiment: str | None
    target: str
    served: Served
    data: Dataset
    assumptions: Assumptions
    storage: str
    dtype: str
    run: Run
    positions_a_step: int
    num_nodes: int | None  # None: as many as are fastest
    own: Estimate
    rented: Estimate | None
    ways: tuple[Way, ...]
    advice: str | None
    serving: Mapping[str, Mapping[int, BreakEven]]  # by machine and nodes; none where its figures are another target's
    cycle_assumptions: Mapping[str, tuple[str, ...]]
    types: tuple[TypePlan, ...]  # of heads; none where the machine's figures are another target's
    pilot: Pilot | None
    settings: dict[str, Any]

    @property
    def estimates(self) -> list[Estimate]:
        return [self.own, *([] if self.rented is None else [self.rented])]

    @property
    def recommendation(self) -> str | None:
        """What to rent, and where to serve."""
        if self.advice is None:
            return None
        nodes = self.num_nodes or COMPARED_NODES[0]
        served = [f"on {name} from {found[nodes].length:.2f} on" for name, found in self.serving.items()]
        if len(served) < 2:
            return self.advice
        return (
            f"{self.advice} Heads from either machine are the same, but where they serve is not: with {nodes} "
            f"nodes they pay {' and '.join(served)} (acceptance length, one request)."
        )

    @property
    def epochs(self) -> float:
        return self.run.positions / max(self.data.train.states, 1)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "experiment": self.experiment,
            "data": asdict(self.data),
            "assumptions": asdict(self.assumptions),
            "cache_bytes": {f"{storage}, {dtype}": self._stored(storage, dtype) for storage, dtype in self._choices()},
            "training": {"trained_parameters": self.own.cost.trained, "epochs": self.epochs, **asdict(self.run)},
            "flops_per_position": self.own.cost.flops_per_position,
            "machines": [_estimate_json(estimated) for estimated in self.estimates],
            "serving": {name: [asdict(one) for one in found.values()] for name, found in self.serving.items()},
            "types": [asdict(kind) for kind in self.types],
            "ways": [{**asdict(way), "hours": way.hours} for way in self.ways],
            "recommendation": self.recommendation,
            "notes": list(notes(self)),
        }
        if self.pilot is not None:
            positions = self.data.train.states
            found["pilot"] = {
                "runs": self.pilot.runs,
                "points": [asdict(point) for point in self.pilot.curve.points],
                "lengths": self.pilot.lengths,
                "fit": asdict(self.pilot.curve.best),
                "planned_positions": positions,
                "expected_speed": self.pilot.curve.at(positions),
                "interval": self.pilot.curve.interval(positions),
                "verdict": verdict(self),
            }
        return found

    def _stored(self, storage: str, dtype: str) -> int:
        return cache_bytes(self.data, self.own.cost.D, storage, dtype)

    def _choices(self) -> list[tuple[str, str]]:
        chosen = (self.storage, self.dtype)
        return [*([] if chosen in STORED else [chosen]), *STORED]


@dataclass(frozen=True)
class Section:
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    said: str = ""


def sections(plan: Plan) -> Iterator[Section]:
    data, own = plan.data, plan.own
    yield Section(
        "Data",
        ("", "answers", "tokens"),
        [
            ("all", f"{data.samples:,}", f"{data.tokens:,}"),
            *(
                (name, f"{split.answers:,}", f"{split.states:,} positions")
                for name, split in (
                    ("train", data.train),
                    ("calibration", data.calibration),
                    ("held-out", data.heldout),
                )
            ),
        ],
        f"{data.answer_tokens:,} of the tokens are answers ({data.source}).",
    )
    yield Section(
        "The cache on disk",
        ("positions stored", "dtype", "GB", ""),
        [
            (
                storage,
                dtype,
                _gb(plan._stored(storage, dtype)),
                "capture.storage, capture.storage_dtype" if (storage, dtype) == (plan.storage, plan.dtype) else "",
            )
            for storage, dtype in plan._choices()
        ],
        f"Checkpoints take {_gb(own.cost.disk_bytes)} GB more. Heads read answer positions alone.",
    )
    yield Section(
        "Training",
        ("", *(estimated.hardware.name for estimated in plan.estimates)),
        [
            ("ranks", *(f"{estimated.cost.world_size}" for estimated in plan.estimates)),
            *(
                (f"GB a rank: {part}", *(f"{estimated.cost.memory[part] / 1e9:.2f}" for estimated in plan.estimates))
                for part in own.cost.memory
            ),
            (
                "GB a rank, of",
                *(
                    f"{estimated.cost.memory_bytes / 1e9:.2f} of {estimated.hardware.memory_gb.value:g}"
                    + ("" if estimated.fits else ": too much")
                    for estimated in plan.estimates
                ),
            ),
            ("positions/s", *(f"{estimated.positions_per_s:,.0f}" for estimated in plan.estimates)),
            (
                "GB/s to read, disk gives",
                *(f"{estimated.read_gb_s:.3g}, {_disk(estimated)}" for estimated in plan.estimates),
            ),
        ],
        f"{own.cost.trained / 1e6:.1f} M parameters, {own.cost.flops_per_position / 1e9:.2f} GFLOP a position; "
        f"{plan.run.steps:,} steps of {plan.positions_a_step:,} positions are {plan.epochs:.1f} epochs.",
    )
    total = sum(stage.hours for stage in own.stages)
    head = ["", own.hardware.name, "share", "money"]
    rows = [
        [stage.name, duration(stage.hours), f"{stage.hours / total:.0%}", _price(own, stage.hours)]
        for stage in own.stages
    ]
    rows.append(["together", duration(total), "", _price(own, total)])
    if plan.rented is not None:
        head += [plan.rented.hardware.name, "money"]
        for row, hours in zip(rows, [*(stage.hours for stage in plan.rented.stages), plan.rented.hours()], strict=True):
            row += [duration(hours), _price(plan.rented, hours)]
    yield Section("Where the time goes", tuple(head), [tuple(row) for row in rows], _how(own))
    if plan.ways:
        yield Section(
            "Sharing the work between the machines",
            ("way", "own", "rented", "GB moved", "moving", "rent", "cost"),
            [
                (
                    way.name,
                    duration(way.own_hours) if way.own_hours else "-",
                    duration(way.rented_hours) if way.rented_hours else "-",
                    _gb(way.moved) if way.moved else "-",
                    duration(way.moving_hours) if way.moved else "-",
                    f"${way.rent:,.0f}",
                    f"${way.cost:,.0f}",
                )
                for way in plan.ways
            ],
            f"Rented hours hold {plan.assumptions.setup_hours:g} h of setting up, fetching "
            f"{_gb(plan.served.weight_bytes)} GB of weights from the hub, and the moves. Cost: the rent, and own "
            "hours at what they are worth.",
        )
    if plan.serving:
        yield Section(
            "Serving one request: the acceptance length that pays",
            ("", "nodes", "baseline tok/s", "cycle ms", "break-even", "low to high", "cycle is"),
            [
                (
                    name,
                    f"{nodes}{' (this plan)' if nodes == plan.num_nodes else ''}",
                    f"{one.baseline_tok_s:.1f}",
                    f"{one.cycle_ms:.1f}",
                    f"{one.length:.2f}",
                    f"{one.low:.2f} to {one.high:.2f}",
                    one.basis,
                )
                for name, found in plan.serving.items()
                for nodes, one in found.items()
            ],
            "The same heads serve on either machine, with the tree that pays there: `evaluate hardware=` chooses it.",
        )
    if plan.types:
        few, many = COMPARED_NODES
        yield Section(
            f"Types of heads on {own.hardware.name}",
            (
                *("", "M parameters", f"a rank reads, MB, {few} nodes", "GFLOP", "collectives", "drafting ms"),
                *("of the pass", f"pays from, {few} nodes", f"{many} nodes", "GFLOP a position", "training"),
            ),
            [_type_row(kind) for kind in plan.types],
            "All as large as this plan's heads, over its draft vocabulary; sizes that those lack are the type's own "
            "defaults. Drafting comes on top of the pass here, though one that was measured with drafts has some of it "
            "inside. What a type accepts is for `evaluate` to say."
            + "".join(
                f" {kind.served.name} heads: {size.drafting.text(size.pass_ms)}."
                for kind in plan.types
                if kind.served.chosen
                for size in kind.served.sizes
            ),
        )
    if plan.pilot is not None:
        curve, positions = plan.pilot.curve, plan.data.train.states
        low, high = curve.interval(positions)
        yield Section(
            f"Learning curve: speed against no speculation on {own.hardware.name}",
            ("positions", "acceptance length", "speed", ""),
            [
                *(
                    (
                        f"{point.positions:,}",
                        f"{length:.3f}",
                        f"{point.value:.3f}",
                        f"fit {curve.at(point.positions):.3f}",
                    )
                    for point, length in zip(curve.points, plan.pilot.lengths, strict=True)
                ),
                (f"{positions:,}", "", f"{curve.at(positions):.3f}", f"extrapolated, {low:.3f} to {high:.3f}"),
            ],
            verdict(plan),
        )


def verdict(plan: Plan) -> str:
    """What the pilot's curve says about break-even on the own machine."""
    assert plan.pilot is not None
    curve, (least, most) = plan.pilot.curve, plan.pilot.pays
    low, high = curve.interval(plan.data.train.states)
    where = f"break-even on {plan.own.hardware.name} ({plan.pilot.break_even.nodes} nodes)"
    if high < least:
        needed = curve.needed(1.0)
        more = "no amount of this data would" if needed is None else f"{needed:,.0f} positions would"
        return f"WARNING: these heads will not reach {where}; by the best fit {more}."
    if low > most:
        return f"These heads are expected to reach {where}."
    return f"Whether they reach {where} is too close to call."


def notes(plan: Plan) -> Iterator[str]:
    """Every assumption, with its basis, and what does not fit together."""
    yield f"{plan.data.samples:,} samples, {plan.data.tokens:,} tokens: {plan.data.source}"
    for estimated in plan.estimates:
        yield from _assumed(estimated.hardware)
    for name, assumed in plan.cycle_assumptions.items():
        yield from (f"{name}: {what}" for what in assumed)
    if plan.ways:
        yield f"setting a rented machine up takes {plan.assumptions.setup_hours:g} h (assumed: plan.setup_hours)"
        if plan.own.price_per_hour is None:
            yield f"an hour of your own machine is worth ${plan.assumptions.own_hour:g} (assumed: plan.own_hour)"
        yield f"long copies reach {NETWORK_SHARE:.0%} of the slower line (assumed)"
        yield f"a conversation takes {CONVERSATION_BYTES} bytes a token as JSONL (measured on the demo's)"
    for estimated in plan.estimates:
        name = estimated.hardware.name
        if not estimated.hardware.is_of(plan.target):
            yield f"{name} has the rates of {estimated.hardware.target}, not of {plan.target}: no break-even"
        if not estimated.fits:
            advice = estimated.cost.smaller(int(estimated.hardware.memory_gb.value * 1e9))
            yield f"training does not fit into a GPU of {name}; it would with: {advice}"
        disk = estimated.hardware.disk_gb_s
        if disk is not None and estimated.read_gb_s > disk.value * estimated.machines:
            yield (
                f"{name} trains faster than its disk reads: {estimated.read_gb_s:.1f} GB/s are needed, "
                f"{disk.value * estimated.machines:g} are there; a smaller capture.storage_dtype, or data.stage_dir"
            )
        if estimated.hardware.gpus and not estimated.cost.low_precision:
            yield f"the experiment trains in fp32, slower on {name} than bf16_tflops says; trainer=gpu is bf16"
        weights, held = (
            plan.served.weight_bytes / 1e9,
            estimated.hardware.memory_gb.value * max(estimated.hardware.gpus, 1),
        )
        if weights > held:
            yield f"the target's weights take {weights:,.0f} GB, {name} has {held:,.0f} GB: it cannot serve it"
    for name, found in plan.serving.items():
        easiest = min(found.values(), key=lambda one: one.length)
        wanted = easiest if plan.num_nodes is None else found[plan.num_nodes]
        if wanted.length > plan.own.cost.K:
            yield (
                f"on {name} num_nodes={wanted.nodes} pays from {wanted.length:.2f} tokens a pass on, of the "
                f"{plan.own.cost.K + 1} that {plan.own.cost.K} heads can give at most; "
                f"num_nodes={easiest.nodes} pays from {easiest.length:.2f} on"
            )
    if not 1 <= plan.epochs <= MANY_EPOCHS:
        steps = max(1, round(2 * plan.data.train.states / plan.positions_a_step))
        yield (
            f"trainer.max_steps={plan.run.steps} are {plan.epochs:.2g} epochs of this data; "
            f"two are trainer.max_steps={steps}"
        )


def _assumed(hardware: Hardware) -> Iterator[str]:
    names = (
        "memory_gb",
        "bf16_tflops",
        "train_share",
        "generate_tok_s",
        "capture_tok_s",
        "network_gbit_s",
        "disk_gb_s",
    )
    for name in (*names, "price_per_hour"):
        figure: Figure | None = getattr(hardware, name)
        if figure is not None and figure.basis == "assumed":
            yield f"{hardware.name}: {name} {figure}"


def text(plan: Plan) -> str:
    """For the terminal."""
    lines = [f"plan for {plan.name} ({plan.target})"]
    for section in sections(plan):
        lines += ["", section.title, *_aligned(section), *([section.said] if section.said else [])]
    if plan.recommendation:
        lines += ["", "Recommendation", plan.recommendation]
    return "\n".join([*lines, "", "Assumptions and remarks", *(f"- {note}" for note in notes(plan))])


def markdown(plan: Plan) -> str:
    """To be committed: the tables, and the commands that carry the plan out."""
    lines = [f"# Plan: {plan.name}", ""]
    if plan.recommendation:
        lines += [plan.recommendation, ""]
    for section in sections(plan):
        lines += [f"## {section.title}", "", _row(section.head), _row(["---"] * len(section.head))]
        lines += [*(_row(row) for row in section.rows), "", *([section.said, ""] if section.said else [])]
    lines += [
        "## Capture",
        "",
        *_capture(plan),
        "",
        "## Vocabulary",
        "",
        _vocabulary(plan),
        "",
        "## Training settings",
        "",
    ]
    lines += [_row(("setting", "value")), _row(("---", "---"))]
    lines += [_row((f"`{name}`", "null" if value is None else f"{value}")) for name, value in plan.settings.items()]
    lines += ["", "## Commands", "", "```sh", *_commands(plan), "```", "", "## Deployment", "", *_deployment(plan)]
    lines += ["", "## Assumptions and remarks", "", *(f"- {note}" for note in notes(plan)), ""]
    return "\n".join(lines)


def _capture(plan: Plan) -> list[str]:
    size = plan._stored(plan.storage, plan.dtype)
    return [
        f"States of {'answer' if plan.storage == 'answers' else 'all'} positions in {plan.dtype}: {_gb(size)} GB. "
        f"A recording server writes them (`capture server=`), or another engine's files are imported (`capture "
        f"source=`). `inspect verify=full` reads every byte once before training starts."
    ]


def _vocabulary(plan: Plan) -> str:
    cost = plan.own.cost
    if plan.settings["draft_vocab_size"] is None:
        small = replace(cost, M=SMALLER_VOCABULARY)
        return (
            f"Heads rank all {cost.M:,} tokens. With `draft_vocab_size={SMALLER_VOCABULARY}` a position takes "
            f"{small.flops_per_position / 1e9:.2f} instead of {cost.flops_per_position / 1e9:.2f} GFLOP and drafting "
            f"reads {SMALLER_VOCABULARY / cost.M:.0%} of the lm_head; what lies outside cannot be drafted, and the "
            f"first lines of `train` say how much of the text that is."
        )
    return (
        f"Heads rank the {cost.M:,} most frequent of {plan.served.vocab_size:,} tokens; the first lines of `train` say "
        f"how much of the text lies outside, where nothing can be drafted."
    )


def _commands(plan: Plan) -> list[str]:
    exp = f" +exp={plan.experiment}" if plan.experiment else ""
    run = f"{exp} name={plan.name}"
    gpus = bool(plan.own.hardware.gpus)
    server = " server=http://127.0.0.1:30000" if gpus else ""
    lines = [
        f"python -m medusa_k25.generate{run}{server} prompts=FILE generate.max_new_tokens={plan.data.longest_answer}"
    ]
    lines.append(f"python -m medusa_k25.capture{run}{server}")
    if gpus and plan.experiment:
        lines.append(f"NAME={plan.name} EXP={plan.experiment} CACHE=runs/{plan.name}/cache launch/hero_run.sh")
    else:
        lines += [f"python -m medusa_k25.{verb}{run}" for verb in ("train", "evaluate", "export")]
    return lines


def _deployment(plan: Plan) -> list[str]:
    if plan.target == "kimi_k25":
        return [
            f"`HEADS=runs/{plan.name}/export launch/serve_sglang.sh` serves them; without `HEADS` it is the baseline "
            "to compare with."
        ]
    return [f"`runs/{plan.name}/export` is the folder to serve from; its README.md has the command."]


def _type_row(kind: TypePlan) -> tuple[str, ...]:
    usual, larger = kind.served.sizes
    drafted = usual.drafting
    return (
        f"{kind.served.name}{' (this plan)' if kind.served.chosen else ''}",
        f"{drafted.parameters / 1e6:.1f}",
        f"{drafted.read_bytes / 1e6:,.0f}",
        f"{drafted.flops / 1e9:.2f}",
        f"{drafted.collectives}",
        f"{drafted.ms:.2f}",
        f"{drafted.ms / usual.pass_ms:.1%}",
        f"{usual.break_even:.2f}",
        f"{larger.break_even:.2f}",
        f"{kind.flops_per_position / 1e9:.2f}",
        duration(kind.hours),
    )


def _how(estimated: Estimate) -> str:
    return "; ".join(f"{stage.name}: {stage.how} ({stage.basis})" for stage in estimated.stages) + "."


def _disk(estimated: Estimate) -> str:
    disk = estimated.hardware.disk_gb_s
    return "unknown" if disk is None else f"{disk.value * estimated.machines:g}"


def _price(estimated: Estimate, hours: float) -> str:
    price = estimated.price_per_hour
    return "yours" if price is None else f"${hours * price:,.0f}"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f}" if size >= 1e10 else f"{size / 1e9:.3g}"


def _aligned(section: Section) -> list[str]:
    """Columns as wide as they need, numbers to the right."""
    table = [section.head, *section.rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(section.head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _estimate_json(estimated: Estimate) -> dict[str, Any]:
    return {
        "hardware": estimated.hardware.name,
        "machines": estimated.machines,
        "memory_bytes": estimated.cost.memory,
        "memory_fits": estimated.fits,
        "positions_per_s": estimated.positions_per_s,
        "read_gb_s": estimated.read_gb_s,
        "hours": {stage.name: stage.hours for stage in estimated.stages},
        "price_per_hour": estimated.price_per_hour,
    }
