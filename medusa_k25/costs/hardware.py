"""A machine in figures, each with where it comes from: measured, a datasheet, or assumed.

What a verify pass costs on it is in cycle.py, what a training run takes in training.py. conf/hardware/ holds the files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from math import isfinite, log
from typing import Any

BASES = ("measured", "datasheet", "assumed")
DEFAULT_CONTEXT = 1024
# Beyond these, figures that say the same thing twice contradict each other; within them they may be noise.
BASELINE_OFF = 0.2  # of the tokens a second that the pass without drafts gives
ALLREDUCE_FASTER = 2  # times as fast as a smaller one
PASS_FASTER = 2  # times as fast as the pass without drafts


@dataclass(frozen=True)
class Figure:
    """One number, and why anybody should believe it."""

    value: float
    basis: str  # one of BASES
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.basis}: {self.source})"


@dataclass(frozen=True)
class Latency:
    """What one all-reduce of `bytes` (of one rank's message) takes."""

    bytes: float
    us: float
    basis: str
    source: str


@dataclass(frozen=True)
class Point:
    """What a pass took: `nodes` tokens verified for each of `batch` requests with `context` tokens before them.

    nodes 1 is a pass without speculation. temperature: of the sampling that verifies, 0 greedy. ms: of the whole cycle,
    drafting included. low_ms and high_ms: of the rounds in which it was measured; None: not known.
    """

    nodes: int
    batch: int
    context: int
    temperature: float
    ms: float
    basis: str
    source: str
    low_ms: float | None = None
    high_ms: float | None = None


@dataclass(frozen=True)
class Hardware:
    """Units are in the names; gb and tb are 1e9 and 1e12 bytes. None: unknown, and whatever needs it says so."""

    name: str
    target: str  # whose passes and rates these are; those of another target would be others
    gpu: str
    gpus: int  # that serve one copy of the target; 0: a CPU
    memory_gb: Figure  # of one GPU, or of the CPU
    bandwidth_tb_s: Figure  # of one GPU's memory
    bandwidth_share: Figure  # of it that a decode pass reaches
    bf16_tflops: Figure  # of one GPU, dense
    train_share: Figure  # of it that training reaches
    fixed_ms: Figure  # of a pass: launches, sampling, scheduling; neither weights nor all-reduces
    allreduces: tuple[Latency, ...]  # by size; none: one device
    cycles: tuple[Point, ...]
    baseline_tok_s: Figure | None  # one request without speculation; None: from the cycle of one node
    generate_tok_s: Figure | None  # answers, all requests together
    capture_tok_s: Figure | None  # states over text that is there, prefill only
    network_gbit_s: Figure | None  # to and from the machine
    disk_gb_s: Figure | None  # reading states, all ranks together
    price_per_hour: Figure | None  # of the whole machine, US dollars; None: it is yours
    notes: tuple[str, ...] = ()  # what whoever reads a verdict about it should know

    def is_of(self, target: str) -> bool:
        """Whether these can be figures of the target called so: kimi_k25, or what its folder or the hub calls it.

        Words that only one of the names has at its end are taken for a variant: smollm2, SmolLM2-135M-Instruct.
        """
        words = [
            re.findall("[a-z0-9]+", name.rstrip("/").rpartition("/")[2].lower().replace(".", ""))
            for name in (self.target, target)
        ]
        return all(ours == theirs for ours, theirs in zip(*words, strict=False))

    @property
    def usual_context(self) -> int:
        """Tokens of context at which single requests were measured; of several the nearest to DEFAULT_CONTEXT."""
        measured = {point.context for point in self.cycles if point.batch == 1}
        return min(measured or {DEFAULT_CONTEXT}, key=lambda context: (abs(log(context / DEFAULT_CONTEXT)), context))

    def allreduce_us(self, message: float) -> float:
        """Of a message of so many bytes: linear between the known sizes, below them as the smallest, above them with
        the last slope; 0 on one device."""
        known = self.allreduces
        if not known or message <= known[0].bytes:
            return known[0].us if known else 0.0
        after = next((i for i, latency in enumerate(known) if latency.bytes >= message), len(known) - 1)
        if after == 0:  # one size is known
            return known[0].us
        left, right = known[after - 1], known[after]
        slope = (right.us - left.us) / (right.bytes - left.bytes)
        return right.us + max(slope, 0.0 if message > right.bytes else slope) * (message - right.bytes)


def hardware(
    name: str,
    target: str,
    gpu: str,
    gpus: int,
    memory_gb: Mapping[str, Any],
    bandwidth_tb_s: Mapping[str, Any],
    bandwidth_share: Mapping[str, Any],
    bf16_tflops: Mapping[str, Any],
    train_share: Mapping[str, Any],
    fixed_ms: Mapping[str, Any],
    allreduces: Sequence[Mapping[str, Any]] | None = (),
    cycles: Sequence[Mapping[str, Any]] | None = (),
    baseline_tok_s: Mapping[str, Any] | None = None,
    generate_tok_s: Mapping[str, Any] | None = None,
    capture_tok_s: Mapping[str, Any] | None = None,
    network_gbit_s: Mapping[str, Any] | None = None,
    disk_gb_s: Mapping[str, Any] | None = None,
    price_per_hour: Mapping[str, Any] | None = None,
    notes: Sequence[str] | None = (),
) -> Hardware:
    """A machine from its file; ValueError, with the figure's name, for one that is missing or impossible, and for two
    that contradict each other.

    A figure is {value, basis, source}, an all-reduce {bytes, us, basis, source}, a cycle {nodes, batch, context,
    temperature, ms, basis, source} and, where they are known, low_ms and high_ms.
    """
    if not isinstance(gpus, int) or gpus < 0:
        raise ValueError(f"hardware {name}: gpus: expected a whole number, 0 for a CPU, got {gpus!r}")

    for what, given in (("allreduces", allreduces), ("cycles", cycles), ("notes", notes)):
        if given is not None and (isinstance(given, str | Mapping) or not isinstance(given, Sequence)):
            raise ValueError(f"hardware {name}: {what}: expected a list, empty where nothing is known, got {given!r}")

    def figure(what: str, given: Mapping[str, Any], most: float | None = None) -> Figure:
        return _checked(Figure, f"hardware {name}: {what}", given, {"value"}, most)

    def known(what: str, given: Mapping[str, Any] | None) -> Figure | None:
        return None if given is None else figure(what, given)

    latencies = [
        _checked(Latency, f"hardware {name}: allreduces[{i}]", given, {"bytes", "us"})
        for i, given in enumerate(allreduces or ())
    ]
    points = [
        _checked(Point, f"hardware {name}: cycles[{i}]", given, {"nodes", "batch", "context", "ms"})
        for i, given in enumerate(cycles or ())
    ]
    for i, point in enumerate(points):
        counts = (point.nodes, point.batch, point.context)
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            raise ValueError(f"hardware {name}: cycles[{i}]: nodes, batch and context are whole numbers, got {counts}")
        spread = [point.ms if ms is None else ms for ms in (point.low_ms, point.ms, point.high_ms)]
        numbers = all(isinstance(ms, int | float) and isfinite(ms) for ms in spread)
        if not numbers or spread[0] <= 0 or spread != sorted(spread):
            raise ValueError(f"hardware {name}: cycles[{i}]: expected 0 < low_ms <= ms <= high_ms, got {spread}")
    places = [(point.nodes, point.batch, point.context, point.temperature) for point in points]
    for place in places:
        if not (isinstance(place[3], int | float) and isfinite(place[3]) and place[3] >= 0):
            raise ValueError(f"hardware {name}: a cycle's temperature is {place[3]!r}, expected 0 (greedy) or more")
        if places.count(place) > 1:
            raise ValueError(f"hardware {name}: two cycles of {place} (nodes, batch, context, temperature); keep one")
    sizes = [latency.bytes for latency in latencies]
    for size in sizes:
        if sizes.count(size) > 1:
            raise ValueError(f"hardware {name}: two all-reduces of {size} bytes; keep one")
    if gpus > 1 and not latencies:
        raise ValueError(f"hardware {name}: {gpus} GPUs, but allreduces is empty; give at least one {{bytes, us}}")
    machine = Hardware(
        name=name,
        target=target,
        gpu=gpu,
        gpus=gpus,
        memory_gb=figure("memory_gb", memory_gb),
        bandwidth_tb_s=figure("bandwidth_tb_s", bandwidth_tb_s),
        bandwidth_share=figure("bandwidth_share", bandwidth_share, most=1),
        bf16_tflops=figure("bf16_tflops", bf16_tflops),
        train_share=figure("train_share", train_share, most=1),
        fixed_ms=figure("fixed_ms", fixed_ms),
        allreduces=tuple(sorted(latencies, key=lambda latency: latency.bytes)),
        cycles=tuple(sorted(points, key=lambda p: (p.temperature, p.batch, p.context, p.nodes))),
        baseline_tok_s=known("baseline_tok_s", baseline_tok_s),
        generate_tok_s=known("generate_tok_s", generate_tok_s),
        capture_tok_s=known("capture_tok_s", capture_tok_s),
        network_gbit_s=known("network_gbit_s", network_gbit_s),
        disk_gb_s=known("disk_gb_s", disk_gb_s),
        price_per_hour=known("price_per_hour", price_per_hour),
        notes=tuple(notes or ()),
    )
    _require_agreement(machine)
    return machine


def _require_agreement(machine: Hardware) -> None:
    """ValueError for two figures of which one must be wrong."""
    name, plain = machine.name, {(p.batch, p.context, p.temperature): p.ms for p in machine.cycles if p.nodes == 1}
    if machine.memory_gb.value < 1:
        raise ValueError(f"hardware {name}: memory_gb is {machine.memory_gb.value:g}, expected 1 or more: 1e9 bytes")
    if plain and machine.fixed_ms.value > min(plain.values()):
        raise ValueError(
            f"hardware {name}: fixed_ms is {machine.fixed_ms.value:g}, but a whole pass of one node took "
            f"{min(plain.values()):g} ms; correct one of them"
        )
    usual = plain.get((1, machine.usual_context, 0.0))
    figure = machine.baseline_tok_s
    if usual and figure is not None and abs(figure.value * usual / 1000 - 1) > BASELINE_OFF:
        raise ValueError(
            f"hardware {name}: baseline_tok_s is {figure.value:g}, but the pass of one node at "
            f"{machine.usual_context:,} tokens of context took {usual:g} ms, {1000 / usual:.1f} tokens/s; correct one, "
            "or leave baseline_tok_s null"
        )
    for i, small in enumerate(machine.allreduces):
        for large in machine.allreduces[i + 1 :]:
            if large.us * ALLREDUCE_FASTER < small.us:
                raise ValueError(
                    f"hardware {name}: an all-reduce of {large.bytes:,.0f} bytes takes {large.us:g} us, one of "
                    f"{small.bytes:,.0f} {small.us:g}: a larger message is not more than {ALLREDUCE_FASTER} times as "
                    "fast; correct one of them"
                )
    for point in machine.cycles:
        alone = plain.get((point.batch, point.context, point.temperature))
        if alone and point.ms * PASS_FASTER < alone:
            raise ValueError(
                f"hardware {name}: a pass of {point.nodes} nodes takes {point.ms:g} ms, one of 1 node {alone:g} at the "
                f"same batch {point.batch}, context {point.context:,} and temperature {point.temperature:g}: it is not "
                f"more than {PASS_FASTER} times as fast; correct one of them"
            )


def _checked(kind: Any, what: str, given: Any, positive: set[str], most: float | None = None) -> Any:
    """`kind` from its mapping, refused unless every key is there and the numbers called `positive` are."""
    names = {field.name for field in fields(kind) if field.default is MISSING}
    known = {field.name for field in fields(kind)}
    if not isinstance(given, Mapping) or not names <= given.keys() <= known:
        raise ValueError(f"{what}: expected {{{', '.join(sorted(names))}}}, got {given!r}")
    for name in positive:
        value = given[name]
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value <= 0 or (most is not None and value > most):
            limit = "" if most is None else f", at most {most:g}"
            raise ValueError(f"{what}: {name} is {value!r}, expected a number above 0{limit}")
    if given["basis"] not in BASES or not str(given["source"] or "").strip():
        raise ValueError(f"{what}: expected a basis ({', '.join(BASES)}) and a source, got {dict(given)!r}")
    return kind(**given)
