"""What a verify pass costs on a machine, and from which acceptance length on speculation pays there.

A pass that was measured costs what was measured. Any other one is put together from its parts: what the GPUs read (the
weights, and of an MoE the experts that n tokens wake), the all-reduces of tensor parallelism, the machine's fixed
share, and drafting; and the sum is moved so that it passes through the nearest measured pass.

    tokens/s of one request = acceptance length / cycle
    break-even acceptance length = cycle x tokens/s without speculation

"Place" is what a pass costs for, besides its number of nodes: (batch, context, temperature).
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path

from medusa_k25.costs.drafting import ITEM_BYTES, Drafting, drafting, every_type
from medusa_k25.costs.hardware import DEFAULT_CONTEXT, Hardware, Point
from medusa_k25.costs.served import KIMI_K25, KIMI_K25_NAME, Served
from medusa_k25.heads import Heads

# Tokens of one text agree on experts: 4 of them were reported to wake 2.5 times the experts of one, where independent
# ones wake 3.9 times. 4 ** 0.672 = 2.54 independent tokens wake as many. Requests of a batch are taken as independent.
CORRELATION = 0.672
SIZES = (*range(2, 10), 12, 16, 24, 32, 48, 64)  # nodes of a pass, among which the fastest are looked for
FAR = 4  # times more or fewer nodes, requests or tokens of context than a measured pass had
COMPARED_NODES = (4, 8)  # of passes for which the types of heads are compared

MEASURED, ASSUMED, INTERPOLATED, EXTRAPOLATED, FROM_PARTS = (
    *("measured", "assumed", "interpolated", "extrapolated"),
    "from parts",
)
ALL_REDUCES = "all-reduces"
EXPERTS = "experts"

# What tuning an all-reduce gave others on 8 GPUs over PCIe, at 32 KB.
TUNED_US, UNTUNED_US, TUNED_BYTES = 26.0, 48.0, 32768

Place = tuple[int, int, float]


@dataclass(frozen=True)
class Cycle:
    """One pass, drafting included. Milliseconds.

    ms takes the experts that tokens of one text wake; low_ms and high_ms hold this and tokens that choose independently
    (an upper bound of the experts), FAR from what was measured both ways to go on from there, between two measured
    passes both of them, and how far the rounds of a measured pass lay apart, where that is known.
    parts: of the pass as the model puts it together, whatever was measured; they need not add up to ms.
    assumed: what went in that nobody has measured here, a datasheet's figures apart.
    """

    nodes: int
    batch: int
    context: int
    temperature: float
    ms: float
    low_ms: float
    high_ms: float
    basis: str  # measured, assumed (a point that is), interpolated, extrapolated or "from parts"
    parts: Mapping[str, float]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Length:
    """An acceptance length and its interval: tokens that a pass emits, the target's own included."""

    mean: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (isfinite(self.high) and 1 <= self.low <= self.mean <= self.high):
            raise ValueError(
                f"acceptance length {self.mean:g} ({self.low:g} to {self.high:g}): expected 1 <= low <= mean <= high; "
                "every pass emits the target's own token, which counts"
            )

    @classmethod
    def around(cls, mean: float, interval: tuple[float, float]) -> "Length":
        """With an interval from resampling, which may miss the mean by a rounding error or on a handful of answers."""
        low, high = interval
        return cls(mean, min(max(low, 1.0), mean), max(high, mean))


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one request; low and high take the intervals of both the length and the cycle."""

    nodes: int
    length: Length
    cycle: Cycle
    tok_s: float
    low_tok_s: float
    high_tok_s: float
    baseline_tok_s: float

    @property
    def ratio(self) -> float:
        return self.tok_s / self.baseline_tok_s


@dataclass(frozen=True)
class BreakEven:
    """The acceptance length from which speculation pays at one number of nodes and one place."""

    nodes: int
    batch: int
    context: int
    temperature: float
    length: float
    low: float  # with the lower and the higher cost of the pass
    high: float
    cycle_ms: float
    baseline_tok_s: float
    basis: str


@dataclass(frozen=True)
class Lever:
    """What faster all-reduces would do to one pass: another way to the break-even than better heads.

    Passes without speculation get faster, too: break_even is against those, break_even_today against today's.
    """

    name: str
    cycle_ms: float
    baseline_tok_s: float
    break_even: float
    break_even_today: float


@dataclass(frozen=True)
class Drafted:
    """A pass with heads that draft for it. break_even: with the drafting on top of the pass, whatever is inside."""

    drafting: Drafting
    pass_ms: float
    break_even: float


@dataclass(frozen=True)
class HeadType:
    """A type of heads on this machine, by the name that checkpoints carry. sizes: in the order of COMPARED_NODES.

    chosen: whether it is that of the heads in question.
    """

    name: str
    chosen: bool
    sizes: tuple[Drafted, ...]


@dataclass(frozen=True)
class CycleModel:
    hardware: Hardware
    served: Served

    @classmethod
    def on(cls, hardware: Hardware, checkpoint: Path) -> "CycleModel":
        """For the target whose figures these are: Kimi-K2.5, else the one at `checkpoint`."""
        if hardware.is_of(KIMI_K25_NAME):
            return cls(hardware, KIMI_K25)
        file = checkpoint / "config.json"
        if not file.is_file():
            raise ValueError(
                f"{checkpoint} has no config.json, whose sizes the passes of hardware={hardware.name} depend on; name "
                "the target's own folder, another hardware=, or how many tokens a pass is to take, num_nodes=N"
            )
        return cls(hardware, Served.of_config(json.loads(file.read_text())))

    @property
    def usual_context(self) -> int:
        return self.hardware.usual_context

    def passes_ms(self, num_nodes: int | None) -> dict[int, float]:
        """What a pass takes, one greedy request, by nodes: `num_nodes`, or all SIZES; drafting apart."""
        return {nodes: self.cycle(nodes, context=self.usual_context).ms for nodes in _sizes(num_nodes)}

    def heads_ms(self, heads: Heads, draft_vocab_size: int, num_nodes: int | None = None) -> dict[int, float]:
        """`passes_ms` with heads that draft; they may lie on the meta device."""
        return {
            nodes: self.cycle(
                nodes, context=self.usual_context, draft_ms=self.drafting(heads, draft_vocab_size, nodes).ms
            ).ms
            for nodes in _sizes(num_nodes)
        }

    def drafting(self, heads: Heads, draft_vocab_size: int, nodes: int, batch: int = 1) -> Drafting:
        """Of `nodes` for each of `batch` requests, see costs.drafting."""
        return drafting(self.hardware, self.served, heads, draft_vocab_size, nodes, batch)

    def types(
        self, heads: Heads, draft_vocab_size: int, batch: int = 1, context: int | None = None, temperature: float = 0.0
    ) -> tuple["HeadType", ...]:
        """All types of heads at the sizes of `heads`, for passes of COMPARED_NODES."""
        place = (batch, self.usual_context if context is None else context, temperature)
        baseline = self.baseline_tok_s(*place)
        found = []
        for name, other in every_type(heads).items():
            sizes = []
            for nodes in COMPARED_NODES:
                pass_ms, drafted = self.cycle(nodes, *place).ms, self.drafting(other, draft_vocab_size, nodes)
                sizes.append(Drafted(drafted, pass_ms, (pass_ms + drafted.ms) * baseline / 1000))
            found.append(HeadType(name, type(other) is type(heads), tuple(sizes)))
        return tuple(found)

    def cycle(
        self,
        nodes: int,
        batch: int = 1,
        context: int = DEFAULT_CONTEXT,
        temperature: float = 0.0,
        draft_ms: float = 0.0,
    ) -> Cycle:
        """`draft_ms`: of one drafting; not added where a measured pass with drafts is the base, which has it inside."""
        _require_pass(nodes, batch, context, temperature)
        if not (isfinite(draft_ms) and draft_ms >= 0):
            raise ValueError(f"drafting takes {draft_ms} ms: expected a number, 0 or more")
        draft_ms = draft_ms if nodes > 1 else 0.0
        parts = self.parts(nodes, batch, context)
        notes = self._notes(nodes, batch)
        points = self._points()
        if not points:
            high = sum(self.parts(nodes, batch, context, independent=True).values()) + draft_ms
            ms = sum(parts.values()) + draft_ms
            return Cycle(
                *(nodes, batch, context, temperature, ms, min(ms, high), max(ms, high), FROM_PARTS),
                parts | {"drafting": draft_ms},
                tuple(notes),
                self._assumed(),
            )

        place = _nearest(points, batch, context, temperature)
        series = [point for point in points if _place(point) == place]
        base = _base(series, nodes)
        if len(base) == 1 and base[0].nodes == 1 < nodes:
            notes.append("no pass with drafts was measured: drafting comes on top")
        else:
            draft_ms = 0.0
        estimates = [self._from(base, nodes, batch, context, independent) for independent in (False, True)]
        base_nodes = base[0].nodes if len(base) == 1 else nodes
        steps = zip((nodes, batch, context), (base_nodes, *place[:2]), strict=True)
        if max(max(asked / known, known / asked) for asked, known in steps) > FAR:
            notes.append(
                f"a pass of {nodes} nodes, batch {batch}, context {context:,} is more than {FAR} times away from the "
                "nearest that was measured: its low and high hold the difference as well as the ratio of the parts"
            )
            estimates += [self._from(base, nodes, batch, context, each, otherwise=True) for each in (False, True)]
        estimates = [estimate + draft_ms for estimate in estimates]
        below, above = _spread(base, nodes)
        ms, low, high = estimates[0], min(estimates) * below, max(estimates) * above
        here = place[:2] == (batch, context)
        if not here:
            notes.append(
                f"batch {batch} with {context:,} tokens of context was not measured: it differs from batch {place[0]} "
                f"with {place[1]:,} by what the parts say"
            )
        if place[2] != temperature:
            notes.append(f"temperature {temperature:g} was not measured: passes at {place[2]:g} are taken")
        if here and place[2] == temperature and base[0].nodes == nodes:
            basis = MEASURED if base[0].basis == MEASURED else ASSUMED
        elif here and place[2] == temperature and len(base) == 2:
            basis = INTERPOLATED
        else:
            basis = EXTRAPOLATED
        if len(base) == 1 and base[0].nodes != nodes:
            notes.append(f"a pass of {nodes} nodes: the nearest that was measured has {base[0].nodes}")
        assumed = tuple(f"a pass of {p.nodes} nodes takes {p.ms:g} ms: {p.source}" for p in base if p.basis == ASSUMED)
        if basis == EXTRAPOLATED:
            assumed += self._assumed()
        return Cycle(nodes, batch, context, temperature, ms, low, high, basis, parts, tuple(notes), assumed)

    def parts(self, nodes: int, batch: int, context: int, independent: bool = False) -> dict[str, float]:
        """Milliseconds of a pass by part, drafting apart.

        `independent`: tokens choose experts independently of each other; else as tokens of one text do.
        """
        machine, served = self.hardware, self.served
        gpus = max(machine.gpus, 1)
        tokens = nodes * batch
        of_one_per_ms = machine.bandwidth_tb_s.value * 1e12 * machine.bandwidth_share.value / 1000
        weights = {
            "weights": served.fixed_bytes / (of_one_per_ms * gpus),
            EXPERTS: served.routed_bytes(tokens if independent else batch * nodes**CORRELATION)
            / (of_one_per_ms * gpus),
        }
        flops = machine.bf16_tflops.value * 1e12 * machine.train_share.value * gpus
        products_ms = 2 * served.active_parameters * tokens / flops * 1000
        allreduce_us = machine.allreduce_us(tokens * served.hidden_size * ITEM_BYTES) if gpus > 1 else 0.0
        return {
            "fixed": machine.fixed_ms.value,
            **weights,
            # what is multiplied is those weights, not the context, which other kernels read
            "products beyond reading": max(0.0, products_ms - sum(weights.values())),
            "context": batch * context * served.kv_bytes_of_rank(machine.gpus) / of_one_per_ms,
            ALL_REDUCES: served.allreduces * allreduce_us / 1000,
        }

    def baseline_tok_s(self, batch: int = 1, context: int = DEFAULT_CONTEXT, temperature: float = 0.0) -> float:
        """Tokens a second of one request without speculation: the machine's figure, where it is for this place."""
        figure = self.hardware.baseline_tok_s
        if figure is not None and (batch, context, temperature) == (1, DEFAULT_CONTEXT, 0.0):
            return figure.value
        return 1000 / self.cycle(1, batch, context, temperature).ms

    def break_even(
        self,
        nodes: int,
        batch: int = 1,
        context: int = DEFAULT_CONTEXT,
        temperature: float = 0.0,
        draft_ms: float = 0.0,
    ) -> BreakEven:
        cycle = self.cycle(nodes, batch, context, temperature, draft_ms)
        baseline = self.baseline_tok_s(batch, context, temperature)
        length, low, high = (ms * baseline / 1000 for ms in (cycle.ms, cycle.low_ms, cycle.high_ms))
        return BreakEven(nodes, batch, context, temperature, length, low, high, cycle.ms, baseline, cycle.basis)

    def speed(
        self,
        nodes: int,
        length: Length,
        batch: int = 1,
        context: int = DEFAULT_CONTEXT,
        temperature: float = 0.0,
        draft_ms: float = 0.0,
    ) -> Speed:
        cycle = self.cycle(nodes, batch, context, temperature, draft_ms)
        return Speed(
            nodes,
            length,
            cycle,
            tok_s=tokens_per_s(length.mean, cycle.ms),
            low_tok_s=tokens_per_s(length.low, cycle.high_ms),
            high_tok_s=tokens_per_s(length.high, cycle.low_ms),
            baseline_tok_s=self.baseline_tok_s(batch, context, temperature),
        )

    def faster_allreduces(
        self,
        nodes: int,
        share: float = TUNED_US / UNTUNED_US,
        batch: int = 1,
        context: int = DEFAULT_CONTEXT,
        temperature: float = 0.0,
    ) -> Lever:
        """With all-reduces that take `share` of their time; drafting as in `cycle` without a draft_ms."""
        if not 0 <= share <= 1:
            raise ValueError(f"faster all-reduces take a share of their time, 0 to 1, got {share}")
        cycle = self.cycle(nodes, batch, context, temperature)
        plain = self.cycle(1, batch, context, temperature)
        today = self.baseline_tok_s(batch, context, temperature)
        saved, plain_saved = ((1 - share) * each.parts[ALL_REDUCES] for each in (cycle, plain))
        fixed, plain_ms = self.hardware.fixed_ms.value, 1000 / today
        cycle_ms = min(cycle.ms, max(cycle.ms - saved, fixed))
        baseline = 1000 / min(plain_ms, max(plain_ms - plain_saved, fixed))
        return Lever(
            name=f"all-reduces in {share:.0%} of their time",
            cycle_ms=cycle_ms,
            baseline_tok_s=baseline,
            break_even=cycle_ms * baseline / 1000,
            break_even_today=cycle_ms * today / 1000,
        )

    def _points(self) -> list[Point]:
        """The measured passes; and the baseline's tokens a second as one, where none like it was measured."""
        machine = self.hardware
        points, figure = list(machine.cycles), machine.baseline_tok_s
        if figure is not None and not any((p.nodes, p.batch) == (1, 1) for p in points):
            ms = 1000 / figure.value
            points.append(Point(1, 1, DEFAULT_CONTEXT, 0.0, ms, figure.basis, figure.source))
        return points

    def _from(
        self, base: list[Point], nodes: int, batch: int, context: int, independent: bool, otherwise: bool = False
    ) -> float:
        """A pass of `base` (or one between two of them), moved by the parts to these nodes, batch and context.

        A dearer pass costs as much more as the parts say; a cheaper one as many times less, which stays above 0.
        `otherwise`: as many times more, or as much less, but no less than half of what the ratio gives.
        """

        def total(nodes: int, batch: int, context: int) -> float:
            return sum(self.parts(nodes, batch, context, independent).values())

        first = base[0]
        if len(base) == 2:
            ms = first.ms + (base[1].ms - first.ms) * (nodes - first.nodes) / (base[1].nodes - first.nodes)
            known = total(nodes, first.batch, first.context)
        else:
            ms, known = first.ms, total(first.nodes, first.batch, first.context)
        asked = total(nodes, batch, context)
        added, scaled = ms + (asked - known), ms * asked / known
        dearer = asked >= known
        if dearer == otherwise:
            return scaled
        return added if dearer else max(added, scaled / 2)

    def _notes(self, nodes: int, batch: int) -> list[str]:
        known, message = self.hardware.allreduces, nodes * batch * self.served.hidden_size * ITEM_BYTES
        if known and self.hardware.gpus > 1 and message > known[-1].bytes:
            return [
                f"all-reduces of {message:,} bytes are beyond the largest that is known ({known[-1].bytes:,.0f}): its "
                "slope is taken to go on"
            ]
        return []

    def _assumed(self) -> tuple[str, ...]:
        """The machine's figures that are assumed and that parts are made of."""
        machine = self.hardware
        figures = [
            ("memory bandwidth, TB/s", machine.bandwidth_tb_s),
            ("share of the memory bandwidth that is reached", machine.bandwidth_share),
            ("fixed share of a pass, ms", machine.fixed_ms),
        ]
        found = [f"{name}: {figure.value:g}, {figure.source}" for name, figure in figures if figure.basis == ASSUMED]
        found += [
            f"an all-reduce of {latency.bytes:,.0f} bytes takes {latency.us:g} us: {latency.source}"
            for latency in machine.allreduces
            if latency.basis == ASSUMED
        ]
        if self.served.experts:
            found.append(
                f"{CORRELATION} as the exponent with which tokens of one text wake experts: one report of 4 tokens"
            )
        return tuple(found)


def reach(length: float, nodes: int) -> str:
    """What a needed acceptance length means for passes of `nodes`, where they never or always have it; else nothing."""
    if length > nodes:
        return f"more than a pass of {nodes} nodes can emit: never"
    return "a pass emits 1 at least: always" if length <= 1 else ""


def tokens_per_s(length: float, cycle_ms: float) -> float:
    """Of one request. ValueError for an acceptance length below 1: a pass emits a token at least."""
    if not length >= 1:
        raise ValueError(f"acceptance length {length:g}: expected 1 or more, a pass emits the target's own token")
    return 1000 * length / cycle_ms


def model_draft_ms(hardware: Hardware, served: Served, read_bytes: float, steps: int, layers: int = 1) -> float:
    """Drafting with a small model that the ranks share: `steps` passes, each of which reads `read_bytes` over all ranks
    and makes an all-reduce behind attention and MLP of each of its `layers`, and one gather."""
    gpus = max(hardware.gpus, 1)
    per_ms = hardware.bandwidth_tb_s.value * 1e12 * hardware.bandwidth_share.value * gpus / 1000
    message_us = hardware.allreduce_us(served.hidden_size * ITEM_BYTES) if gpus > 1 else 0.0
    return steps * (read_bytes / per_ms + (2 * layers + 1) * message_us / 1000)


def _sizes(num_nodes: int | None) -> tuple[int, ...]:
    if num_nodes is not None and not (isinstance(num_nodes, int) and num_nodes >= 2):
        raise ValueError(
            f"num_nodes={num_nodes}: expected a whole number, 2 or more, the root is one of them; null: the fastest"
        )
    return SIZES if num_nodes is None else (num_nodes,)


def _require_pass(nodes: int, batch: int, context: int, temperature: float) -> None:
    if min(nodes, batch, context) < 1:
        raise ValueError(f"a pass of {nodes} nodes, batch {batch}, context {context}: expected 1 or more of each")
    if not (isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature}: expected 0 (greedy) or more")


def _spread(base: list[Point], nodes: int) -> tuple[float, float]:
    """The lowest and the highest round of a measured pass as shares of what it took.

    Between two measured passes those of both: costs may rise by steps, and nothing says where.
    """
    weight = (nodes - base[0].nodes) / (base[1].nodes - base[0].nodes) if len(base) == 2 else 0.0
    ms = base[0].ms + (base[-1].ms - base[0].ms) * weight
    below = min(point.ms if point.low_ms is None else point.low_ms for point in base)
    above = max(point.ms if point.high_ms is None else point.high_ms for point in base)
    return below / ms, above / ms


def _place(point: Point) -> Place:
    return point.batch, point.context, point.temperature


def _nearest(points: list[Point], batch: int, context: int, temperature: float) -> Place:
    """Where passes were measured: at the nearest temperature, rather below than above, and there the nearest."""

    def distance(place: Place) -> tuple[float, bool, float]:
        above = place[0] > batch or place[1] > context
        return abs(place[2] - temperature), above, abs(log(place[0] / batch)) + abs(log(place[1] / context))

    return min((_place(point) for point in points), key=distance)


def _base(series: list[Point], nodes: int) -> list[Point]:
    """The point of `nodes`, else the two around it, else the nearest."""
    series = sorted(series, key=lambda point: point.nodes)
    after = bisect_left([point.nodes for point in series], nodes)
    if after < len(series) and series[after].nodes == nodes:
        return [series[after]]
    if 0 < after < len(series):
        return series[after - 1 : after + 1]
    return [series[min(after, len(series) - 1)]]
