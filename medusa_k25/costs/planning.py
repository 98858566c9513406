"""What making the data, training on it and moving it would take, on one machine or on two: the arithmetic of `plan`.

Everything follows from the sizes of a run (costs.TrainingCost), of the data (Dataset) and of a machine (hardware.py).
gb are 1e9 bytes, hours are of one machine, money is in US dollars.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from medusa_k25.costs.cycle import BreakEven, CycleModel, HeadType
from medusa_k25.costs.drafting import every_type
from medusa_k25.costs.hardware import Figure, Hardware
from medusa_k25.costs.served import Served
from medusa_k25.costs.training import TrainingCost
from medusa_k25.data.splits import CALIBRATION_SHARE, HELDOUT_SHARE

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
POSITION_BYTES, SCALE_BYTES = 8, 4  # of a state, the latter in fp8 alone
TOKEN_BYTES = 5  # id and loss mask
DOCUMENT_BYTES = 470  # its line in the index, measured on the demo's cache
CONVERSATION_BYTES = 12  # of a row of conversations.jsonl, a token: ids and text, measured likewise
HEAD_BYTES = 2  # of an exported parameter
NETWORK_SHARE = 0.92  # of a line's speed that long copies reach


@dataclass(frozen=True)
class Split:
    """The answers of a split. states: the positions to draft from, one less than the tokens of each answer."""

    answers: int
    states: int


@dataclass(frozen=True)
class Dataset:
    """Conversations of one answer each. source: a file that was counted, or where the assumption comes from."""

    samples: int
    prompt_tokens: int  # of all samples
    answer_tokens: int
    longest_answer: int
    train: Split
    calibration: Split
    heldout: Split
    source: str

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @classmethod
    def assumed(
        cls, samples: int, prompt_tokens: float, answer_tokens: float, longest_answer: int, source: str
    ) -> "Dataset":
        """From means a sample, split as the hash does it."""

        def split(share: float) -> Split:
            answers = round(samples * share)
            return Split(answers, round(answers * (answer_tokens - 1)))

        return cls(
            samples,
            round(samples * prompt_tokens),
            round(samples * answer_tokens),
            longest_answer,
            split(1 - CALIBRATION_SHARE - HELDOUT_SHARE),
            split(CALIBRATION_SHARE),
            split(HELDOUT_SHARE),
            source,
        )

    def scaled(self, samples: int) -> "Dataset":
        """As many `samples`, like these on average."""
        factor = samples / self.samples

        def more(split: Split) -> Split:
            return Split(round(split.answers * factor), round(split.states * factor))

        return Dataset(
            samples,
            round(self.prompt_tokens * factor),
            round(self.answer_tokens * factor),
            self.longest_answer,
            more(self.train),
            more(self.calibration),
            more(self.heldout),
            f"{self.source}, scaled from {self.samples:,} samples",
        )


@dataclass(frozen=True)
class Assumptions:
    """What conf/plan says: the data to plan for, and what no hardware file knows.

    samples, prompt_tokens, answer_tokens (means a sample): None is what `conversations=` holds, or without such a file
    USERS. setup_hours: of a rented machine before its first token. own_hour: dollars that an hour of a machine without
    a price is worth. Raises ValueError for impossible figures.
    """

    samples: int | None
    prompt_tokens: float | None
    answer_tokens: float | None
    longest_answer: int
    setup_hours: float
    own_hour: float

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("prompt_tokens", 1), ("answer_tokens", 2), ("longest_answer", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"plan.{name}={value}: expected at least {least}, or null for what is known")
        for name in ("setup_hours", "own_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"plan.{name}={getattr(self, name)}: expected 0 or more")

    def dataset(self, counted: Dataset | None) -> Dataset:
        """What was counted, or USERS, with what is set here."""
        known = counted or replace(USERS, longest_answer=self.longest_answer)
        if self.prompt_tokens is None and self.answer_tokens is None:
            return known if self.samples is None or self.samples == known.samples else known.scaled(self.samples)
        return Dataset.assumed(
            self.samples or known.samples,
            self.prompt_tokens or known.prompt_tokens / known.samples,
            self.answer_tokens or known.answer_tokens / known.samples,
            known.longest_answer,
            "assumed: plan.prompt_tokens, plan.answer_tokens",
        )


USERS = Dataset.assumed(
    37_000, 500, 1_500, 16_384, "assumed: 37,000 samples of 500 + 1,500 tokens, no file was counted"
)


def state_bytes(hidden_size: int, dtype: str) -> int:
    """Of one stored state, its position and scale not counted."""
    return hidden_size * ITEM_BYTES[dtype]


def cache_bytes(data: Dataset, hidden_size: int, storage: str, dtype: str) -> int:
    """What a cache of `data` takes on disk. storage: "answers" or "all", as in conf/capture."""
    states = data.answer_tokens if storage == "answers" else data.tokens - data.samples
    a_state = state_bytes(hidden_size, dtype) + POSITION_BYTES + (SCALE_BYTES if dtype == "float8_e4m3fn" else 0)
    return states * a_state + data.tokens * TOKEN_BYTES + data.samples * DOCUMENT_BYTES


def transfer_hours(size: float, gbit_s: float) -> float:
    """Of `size` bytes over a line."""
    return size * 8 / (gbit_s * 1e9 * NETWORK_SHARE) / 3600


def known(hardware: Hardware, name: str) -> Figure:
    """A figure that a plan needs; ValueError says where to fill it in."""
    figure: Figure | None = getattr(hardware, name)
    if figure is None:
        raise ValueError(
            f"hardware {hardware.name}: {name} is null, and the plan needs it; measure or assume it in "
            f"conf/hardware/{hardware.name}.yaml, as {{value, basis, source}}"
        )
    return figure


@dataclass(frozen=True)
class Run:
    """A run's work, whatever the machine: positions trained on, validated in all, and ranked by `evaluate`."""

    positions: int
    validated: int
    steps: int
    evaluated: int


def heads_break_even(
    hardware: Hardware, served: Served, cost: TrainingCost, nodes: int
) -> tuple[BreakEven, tuple[str, ...]]:
    """Of one greedy request that the heads of `cost` draft for, `nodes` tokens a pass; and what was assumed for it."""
    model = CycleModel(hardware, served)
    context, draft_ms = model.usual_context, model.drafting(cost.heads, cost.M, nodes).ms
    cycle = model.cycle(nodes, context=context, draft_ms=draft_ms)
    return model.break_even(nodes, context=context, draft_ms=draft_ms), cycle.assumed


def planned_run(
    data: Dataset,
    steps: int,
    positions_a_step: int,
    validate_every: int,
    most_answers: int | None,
    most_evaluated: int | None,
) -> Run:
    """`most_answers` of a split are validated every `validate_every` steps; None: all. Training text is validated on as
    many answers as held-out text. most_evaluated: positions of a split that `evaluate` reads; None: all."""

    def validated(split: Split, answers: int) -> float:
        return min(answers, most_answers or answers) * split.states / max(split.answers, 1)

    once = sum(
        validated(split, answers)
        for split, answers in (
            (data.calibration, data.calibration.answers),
            (data.heldout, data.heldout.answers),
            (data.train, min(data.heldout.answers, data.train.answers)),
        )
    )
    steps_an_epoch = ceil(data.train.states / positions_a_step)  # a step never crosses an epoch
    return Run(
        positions=round(steps / steps_an_epoch * data.train.states),
        validated=ceil(steps / validate_every) * round(once),
        steps=steps,
        evaluated=sum(min(split.states, most_evaluated or split.states) for split in (data.calibration, data.heldout)),
    )


@dataclass(frozen=True)
class Stage:
    """A part of the way to heads on one machine. how: the division behind the hours. basis: of its rate."""

    name: str
    hours: float
    how: str
    basis: str


@dataclass(frozen=True)
class Estimate:
    """What the whole way takes on one kind of machine, `machines` of them side by side."""

    hardware: Hardware
    machines: int
    cost: TrainingCost
    positions_per_s: float
    read_gb_s: float  # that training at full speed reads
    stages: tuple[Stage, ...]

    def hours(self, *names: str) -> float:
        """Of the stages called `names`, of all without."""
        return sum(stage.hours for stage in self.stages if not names or stage.name in names)

    @property
    def price_per_hour(self) -> float | None:
        """Of all machines together; None: it is yours."""
        price = self.hardware.price_per_hour
        return None if price is None else price.value * self.machines

    @property
    def fits(self) -> bool:
        return self.cost.memory_bytes <= self.hardware.memory_gb.value * 1e9


def positions_per_s(cost: TrainingCost, hardware: Hardware) -> float:
    """Of all ranks: their peak, the share of it that training reaches, and the work of a position."""
    return cost.world_size * hardware.bf16_tflops.value * 1e12 * hardware.train_share.value / cost.flops_per_position


def estimate(
    hardware: Hardware,
    cost: TrainingCost,
    data: Dataset,
    run: Run,
    dtype: str,
    measured: float | None = None,
    machines: int = 1,
) -> Estimate:
    """`measured`: positions/s of all ranks that were timed; None: from the hardware's peak."""
    generate, capture = known(hardware, "generate_tok_s"), known(hardware, "capture_tok_s")
    speed = measured or positions_per_s(cost, hardware)
    a_state = state_bytes(cost.D, dtype)
    read_gb_s = speed * a_state / 1e9
    disk = hardware.disk_gb_s
    slowed = max(1.0, read_gb_s / (disk.value * machines)) if disk is not None else 1.0
    forward = speed * cost.flops_per_position / cost.forward_flops_per_position
    train_s = run.positions / speed * slowed + run.validated / forward
    one = forward / cost.world_size  # evaluate runs on one device
    rate = f"timed {speed:,.0f} positions/s" if measured else f"{speed:,.0f} positions/s"
    basis = "measured" if measured else _weakest(hardware.bf16_tflops, hardware.train_share)
    several = f" x {machines} machines" if machines > 1 else ""
    stages = (
        Stage(
            "generate",
            data.answer_tokens / generate.value / machines / 3600,
            f"{data.answer_tokens:,} answer tokens at {generate.value:,.0f} a second{several}",
            generate.basis,
        ),
        Stage(
            "capture",
            data.tokens / capture.value / machines / 3600,
            f"{data.tokens:,} tokens at {capture.value:,.0f} a second{several}",
            capture.basis,
        ),
        Stage(
            "train",
            train_s / 3600,
            f"{run.positions:,} positions at {rate}, {run.validated:,} validated"
            + (f"; {slowed:.1f} times as long for want of disk speed" if slowed > 1 else ""),
            basis,
        ),
        Stage(
            "evaluate",
            run.evaluated / one / 3600,
            f"{run.evaluated:,} positions at {one:,.0f} a second on one device",
            basis,
        ),
    )
    return Estimate(hardware, machines, cost, speed, read_gb_s, stages)


@dataclass(frozen=True)
class TypePlan:
    """A type of heads at the sizes of the experiment: what it serves for and what it takes to train.

    hours: of training on the machine that the plan is for.
    """

    served: HeadType
    flops_per_position: float
    hours: float


def compared_types(own: Estimate, served: Served, data: Dataset, run: Run, dtype: str) -> tuple[TypePlan, ...]:
    """All types of heads on the machine of `own`, from the hardware's peak."""
    cost = own.cost
    found = []
    others = every_type(cost.heads)
    for kind in CycleModel(own.hardware, served).types(cost.heads, cost.M):
        other = replace(cost, heads=others[kind.name])
        hours = estimate(own.hardware, other, data, run, dtype, machines=own.machines).hours("train")
        found.append(TypePlan(kind, other.flops_per_position, hours))
    return tuple(found)


def _weakest(*figures: Figure) -> str:
    """The basis that one believes least."""
    return max((figure.basis for figure in figures), key=("measured", "datasheet", "assumed").index)


@dataclass(frozen=True)
class Way:
    """One way of sharing the stages between a machine of one's own and a rented one.

    moved: bytes to or from the own machine. rented_hours include setting up, fetching the target's weights, and the
    moves, during which the rented machine waits. money: rent. cost: rent, and the own hours at what they are worth.
    """

    name: str
    own_hours: float
    rented_hours: float
    moved: float
    moving_hours: float
    rent: float
    cost: float

    @property
    def hours(self) -> float:
        return self.own_hours + self.rented_hours


def ways(
    own: Estimate, rented: Estimate, data: Dataset, served: Served, assumed: Assumptions, storage: str, dtype: str
) -> list[Way]:
    """Everything at home first; then what could be done on the rented machine, and what would have to be moved."""
    line = min(known(own.hardware, "network_gbit_s").value, known(rented.hardware, "network_gbit_s").value)
    its_line = known(rented.hardware, "network_gbit_s").value
    start = assumed.setup_hours + transfer_hours(served.weight_bytes, its_line)
    rows = data.tokens * CONVERSATION_BYTES
    heads = own.cost.trained * HEAD_BYTES
    stored = cache_bytes(data, own.cost.D, storage, dtype)
    smallest = cache_bytes(data, own.cost.D, "answers", "float8_e4m3fn")
    own_price = assumed.own_hour if own.price_per_hour is None else own.price_per_hour
    rented_price = assumed.own_hour if rented.price_per_hour is None else rented.price_per_hour

    def way(name: str, at_home: Sequence[str], away: Sequence[str], moved: float) -> Way:
        own_hours = own.hours(*at_home) if at_home else 0.0
        moving = transfer_hours(moved, line)
        rented_hours = start + rented.hours(*away) + moving if away else 0.0
        rent = rented_hours * rented_price
        return Way(name, own_hours, rented_hours, moved, moving if away else 0.0, rent, rent + own_hours * own_price)

    every = ("generate", "capture", "train", "evaluate")
    there, here = rented.hardware.name, own.hardware.name
    return [
        way(f"everything on {here}", every, (), 0),
        way(f"everything on {there}, the heads come back", (), every, rows + heads),
        way(f"answers and states on {there}, states as stored move", every[2:], every[:2], stored),
        way(f"answers and states on {there}, answers' fp8 states move", every[2:], every[:2], smallest),
        way(f"answers on {there}, their JSONL moves", every[1:], every[:1], rows),
        way(f"answers on {here}, the rest on {there}, JSONL moves", every[:1], every[1:], rows + heads),
    ]


ABOUT_THE_SAME = 1 / 3  # of the cost: the rates are not known better than that


def recommendation(found: Sequence[Way], own: Estimate, rented: Estimate, assumed: Assumptions) -> str:
    """One paragraph: what renting buys, and whether it is worth it. `found`: as `ways` gives them."""
    home, best = found[0], min(found[1:], key=lambda way: way.cost)
    there, here = rented.hardware.name, own.hardware.name
    made, made_there = own.hours("generate", "capture"), rented.hours("generate", "capture")
    worth = assumed.own_hour if own.price_per_hour is None else own.price_per_hour
    saved = home.hours - best.hours
    if best.cost > (1 + ABOUT_THE_SAME) * home.cost:
        verdict = "dearer: for this data it is not worth renting."
    elif best.cost < (1 - ABOUT_THE_SAME) * home.cost:
        verdict = "cheaper: it is worth renting."
    elif saved > 0:
        verdict = f"about the same: rent only if having the heads {duration(saved)} earlier matters."
    else:
        verdict = "about the same, and no faster: do not rent."
    trained, trained_there = own.hours("train"), rented.hours("train")
    bought = f"generating and capturing in {duration(made_there)} instead of {duration(made)}"
    if trained < made:
        bought = f"so training is no reason to rent: what {there} buys is {bought}"
    else:
        bought = f"and {there} buys training in {duration(trained_there)}, and {bought}"
    return (
        f"On {here} the whole way takes {duration(home.hours)}, {made / home.hours:.0%} of it for making the data and "
        f"{duration(trained)} for training, {bought}. The cheapest way with it is '{best.name}': "
        f"{duration(best.hours)} in all, ${best.rent:,.0f} of rent. With an hour of {here} worth "
        f"${worth:g}, that is ${best.cost:,.0f} beside ${home.cost:,.0f} at home, {verdict}"
    )


def duration(hours: float) -> str:
    """For people: the unit that suits it."""
    if hours < 0:
        return f"-{duration(-hours)}"
    if hours < 1.5 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 1.5 else f"{hours:.1f} h"
