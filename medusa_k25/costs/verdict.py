"""Does it pay? Acceptance lengths and what a pass costs, made into tokens a second, and one sentence."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from medusa_k25.acceptance import Row
from medusa_k25.costs.cycle import (
    EXTRAPOLATED,
    FROM_PARTS,
    MEASURED,
    TUNED_BYTES,
    TUNED_US,
    UNTUNED_US,
    BreakEven,
    CycleModel,
    HeadType,
    Length,
    Lever,
    Speed,
    reach,
)
from medusa_k25.costs.drafters import drafters_for
from medusa_k25.costs.hardware import DEFAULT_CONTEXT
from medusa_k25.data.texts import temperature_note

PAYS, PAYS_NOT, TOO_CLOSE, REHEARSAL = "pays", "does not pay", "too close to call", "a rehearsal"
NOTHING = "none"
MAKERS = (
    "their acceptance lengths are of other text, the brackets are the range over tasks and no interval of confidence, "
    "and most makers count the token of prefill, too"
)
TYPES_SAID = (
    "as large as these; here drafting comes on top of a pass, though one that was measured with drafts has some of it "
    "inside"
)
SHOWN_SIZES = (2, 4, 8, 16)  # whose break-even is given, besides those that are asked for


@dataclass(frozen=True)
class Candidate:
    """A predictor that verifies `nodes` tokens a pass, and what it accepts.

    published: by its makers, on their text, and then the interval of its length is the range over their tasks; else
    replayed on yours. drafting_known: else drafting is taken as nothing. launch: the command that serves it. others:
    who else measured an acceptance length, and which.
    """

    predictor: str
    nodes: int
    length: Length
    draft_ms: float = 0.0
    published: bool = False
    source: str = ""
    licence: str = ""
    launch: str = ""
    drafting_known: bool = True
    others: tuple[str, ...] = ()

    @property
    def has_one_figure(self) -> bool:
        """Whether a single length was published, which tells nothing of how it differs between texts."""
        return self.published and self.length.low == self.length.high

    @property
    def length_and_range(self) -> str:
        length = self.length
        if self.has_one_figure:
            return f"{length.mean:.3f} (one figure, no range)"
        return f"{length.mean:.3f} ({length.low:.3f} to {length.high:.3f}{' by task' if self.published else ''})"


@dataclass(frozen=True)
class VerdictRow:
    """needed_length: at this cycle; needed_cycle_ms: at this length; from there on it pays."""

    candidate: Candidate
    length: str  # as it is shown: the mean, and what its brackets are
    speed: Speed
    outcome: str  # pays, does not pay, too close to call; a rehearsal: the text is another model's than the passes
    needed_length: float
    needed_cycle_ms: float


@dataclass(frozen=True)
class Verdict:
    hardware: str
    target: str
    batch: int
    context: int
    temperature: float
    baseline_tok_s: float
    rows: tuple[VerdictRow, ...]  # the fastest first
    sentence: str
    break_even: tuple[BreakEven, ...]  # by nodes; without drafting, except where passes were measured with it
    levers: tuple[tuple[int, Lever], ...]  # by nodes
    types: tuple[HeadType, ...]  # of heads as large as those that were replayed; none without heads
    assumptions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The table, the sentence, what would turn it, and every assumption."""
        where = f"{self.target} on {self.hardware}, batch {self.batch}, context {self.context:,}"
        wide = max(len("predictor"), *(len(row.candidate.predictor) for row in self.rows))
        lines = [
            f"{where}, temperature {self.temperature:g}; tokens/s are those of one request"
            + "".join(f"; heads are {each.name} ones" for each in self.types if each.chosen),
            f"{'predictor':<{wide}}  nodes  {'acceptance length':<30}  {'cycle':<21}  {'tokens/s':<24}  against none",
            f"{NOTHING:<{wide}}  {1:5}  {1:5.3f}{'':25}  {1000 / self.baseline_tok_s:5.1f} ms{'':13}  "
            f"{self.baseline_tok_s:7.1f}{'':17}  {1:5.2f}x",
        ]
        for row in self.rows:
            speed = row.speed
            lines.append(
                f"{row.candidate.predictor:<{wide}}  {row.candidate.nodes:5}  {row.length:<30}  "
                f"{speed.cycle.ms:5.1f} ms {speed.cycle.basis:<12}  "
                f"{speed.tok_s:7.1f} ({speed.low_tok_s:5.1f} to {speed.high_tok_s:5.1f})  {speed.ratio:5.2f}x "
                f"{row.outcome}{', published' if row.candidate.published else ''}"
            )
        lines += ["", self.sentence, "", "acceptance length from which speculation pays"]
        if any(each.basis == FROM_PARTS for each in self.break_even):
            lines[-1] += ", if drafting took no time"
        lines += [
            f"  {each.nodes:3} nodes: {each.length:.2f} ({each.low:.2f} to {each.high:.2f}) at {each.cycle_ms:.1f} ms, "
            f"{each.basis}{_in_brackets(reach(each.length, each.nodes))}"
            for each in self.break_even
        ]
        if self.levers:
            lines += [
                f"the same with {self.levers[0][1].name} (in brackets: against today's {self.baseline_tok_s:.0f} "
                "tokens/s without speculation, which get faster, too)"
            ]
        lines += [
            f"  {nodes:3} nodes: {lever.break_even:.2f} ({lever.break_even_today:.2f}) at {lever.cycle_ms:.1f} ms, "
            f"{lever.baseline_tok_s:.0f} tokens/s without speculation{_in_brackets(reach(lever.break_even, nodes))}"
            for nodes, lever in self.levers
        ]
        if self.types:
            lines += ["", f"types of heads: {TYPES_SAID}"]
        for each in self.types:
            lines += [f"  {each.name}{' (these heads)' if each.chosen else ''}"]
            lines += [
                f"    pays from {size.break_even:.2f} on; {size.drafting.text(size.pass_ms)}" for size in each.sizes
            ]
        if published := [row.candidate for row in self.rows if row.candidate.published]:
            lines += ["", f"drafters that others published: {MAKERS}"]
        for candidate in published:
            lines += [f"  {candidate.predictor}, licence {candidate.licence}: {candidate.source}"]
            lines += [f"    {other}" for other in candidate.others]
            lines += [f"    {candidate.launch}"]
        lines += ["", "assumptions", *(f"  - {assumption}" for assumption in self.assumptions)]
        return "\n".join(lines)


def no_drafting(nodes: int) -> float:
    return 0.0


def fastest_candidates(
    rows: Sequence[Row],
    model: CycleModel,
    draft_ms: Mapping[str, Callable[[int], float]],
    batch: int = 1,
    context: int = DEFAULT_CONTEXT,
    temperature: float = 0.0,
) -> list[Candidate]:
    """Each predictor with as many nodes as are fastest on calibration text, and what it accepts on held-out text.

    draft_ms: of a tree of so many nodes, by predictor; a lookup has none and drafts in no time.
    """
    candidates = []
    for predictor in dict.fromkeys(row.predictor for row in rows):
        drafting = draft_ms.get(predictor, no_drafting)
        best = max(
            (row for row in rows if row.predictor == predictor),
            key=lambda row: (
                row.calibration.length
                / model.cycle(row.num_nodes, batch, context, temperature, drafting(row.num_nodes)).ms
            ),
        )
        candidates.append(
            Candidate(
                predictor,
                best.num_nodes,
                Length.around(best.every.length, best.interval),
                drafting(best.num_nodes),
            )
        )
    return candidates


def published_candidates(model: CycleModel) -> list[Candidate]:
    """The drafters that others published for the machine's target."""
    return [
        Candidate(
            drafter.name,
            drafter.nodes,
            drafter.length,
            drafter.draft_ms(model.hardware, model.served),
            published=True,
            source=drafter.source,
            licence=drafter.licence,
            launch=drafter.launch,
            drafting_known=drafter.read_bytes is not None,
            others=tuple(f"{who}: an acceptance length of {length:g}" for who, length in drafter.others.items()),
        )
        for drafter in drafters_for(model.hardware)
    ]


def judge(
    model: CycleModel,
    candidates: Sequence[Candidate],
    target: str | None,
    batch: int = 1,
    context: int = DEFAULT_CONTEXT,
    temperature: float = 0.0,
    text_temperatures: Collection[float | None] = (None,),
    types: Sequence[HeadType] = (),
) -> Verdict:
    """`target`: whose text was replayed, by its name on the hub; None: unknown, and taken for the hardware's. Of any
    other target no row that was replayed has an outcome. `text_temperatures`: at which that text was sampled, None:
    unknown. types: of heads, which the verdict compares.

    ValueError where there is no candidate, or one verifies fewer than 2 nodes.
    """
    if not candidates:
        raise ValueError("no predictor to judge; give at least one with its acceptance length")
    for candidate in candidates:
        if candidate.nodes < 2:
            raise ValueError(f"{candidate.predictor}: {candidate.nodes} nodes; a pass with drafts verifies 2 or more")
    baseline = model.baseline_tok_s(batch, context, temperature)
    rows = []
    for candidate in candidates:
        speed = model.speed(candidate.nodes, candidate.length, batch, context, temperature, candidate.draft_ms)
        rows.append(
            VerdictRow(
                candidate,
                candidate.length_and_range,
                speed,
                _outcome(candidate, speed),
                needed_length=speed.cycle.ms * baseline / 1000,
                needed_cycle_ms=1000 * candidate.length.mean / baseline,
            )
        )
    rows.sort(key=lambda row: -row.speed.tok_s)
    sentence = _sentence(rows, baseline)
    own = [row for row in rows if not row.candidate.published]
    if target is None and own:
        unknown = _unknown_target(model)
        sentence += f" {unknown[0].upper()}{unknown[1:]}."
    elif target is not None and own and not model.hardware.is_of(target):
        sentence = (
            f"No verdict: the text is {target}'s, the passes are {model.hardware.target}'s; as a rehearsal the rows "
            f"say: {_sentence(own, baseline)}"
        )
        rows = [row if row.candidate.published else replace(row, outcome=REHEARSAL) for row in rows]
    sizes = sorted({*SHOWN_SIZES, *(candidate.nodes for candidate in candidates)})
    levers = []
    if _has_measured_allreduces(model):
        levers = [(n, model.faster_allreduces(n, TUNED_US / UNTUNED_US, batch, context, temperature)) for n in sizes]
    return Verdict(
        hardware=model.hardware.name,
        target=target or model.hardware.target,
        batch=batch,
        context=context,
        temperature=temperature,
        baseline_tok_s=baseline,
        rows=tuple(rows),
        sentence=sentence,
        break_even=tuple(model.break_even(n, batch, context, temperature) for n in sizes),
        levers=tuple(levers),
        types=tuple(types),
        assumptions=tuple(_assumptions(model, rows, target, batch, context, temperature, text_temperatures)),
    )


def _outcome(candidate: Candidate, speed: Speed) -> str:
    """For sure only where the whole interval is on one side, and what it leaves out could not turn it."""
    if candidate.has_one_figure:
        return TOO_CLOSE
    if speed.low_tok_s > speed.baseline_tok_s:
        return PAYS if candidate.drafting_known else TOO_CLOSE
    return PAYS_NOT if speed.high_tok_s < speed.baseline_tok_s else TOO_CLOSE


def _sentence(rows: Sequence[VerdictRow], baseline: float) -> str:
    """Of rows that are sorted by tokens a second."""
    best = rows[0]
    paying = next((row for row in rows if row.outcome == PAYS), None)
    close = next((row for row in rows if row.outcome == TOO_CLOSE), None)
    said = paying or close or best
    if paying:
        text = (
            f"{_name(said)} pays: {_speed(said)} against {baseline:.1f} without speculation, "
            f"{said.speed.ratio:.2f}x{_if(said)}"
        )
        if best is not said:
            text += f"; {_name(best)} may be faster, but is too close to call: {_speed(best)}{_if(best)}"
    elif close:
        inside = said.speed.low_tok_s <= baseline <= said.speed.high_tok_s
        against = f", and {baseline:.1f} without speculation lies inside" if inside else f" against {baseline:.1f}"
        text = (
            f"Too close to call: {'the best is ' if said is best else ''}{_name(said)} at {_speed(said)}{against}"
            f"{_if(said)}; {_doubts(said)}{_turning(said)}"
        )
        if best is not said:
            text += f"; {_name(best)} at {_speed(best)} does not pay"
    else:
        text = f"Nothing pays: the best is {_name(said)} at {_speed(said)} against {baseline:.1f}{_if(said)}; "
        text += _turning(said)
    text += "."
    if said.candidate.published:
        name = said.candidate.predictor
        text += f" The acceptance length of {name} is its makers', on their text: measure it on yours."
        own = next((row for row in rows if not row.candidate.published), None)
        if own is not None:
            more = "" if own.outcome == PAYS else f"; {_turning(own)}"
            text += f" The best on your own text is {_name(own)} at {_speed(own)}{_if(own)}: {own.outcome}{more}."
    return text


def _if(row: VerdictRow) -> str:
    """What the speed of a row rests on, where its pass was not measured."""
    cycle = row.speed.cycle
    if cycle.basis == MEASURED:
        return ""
    return f", if a pass takes {cycle.ms:.1f} ms, which is {_how(cycle.basis)}"


def _how(basis: str) -> str:
    return "put together from parts" if basis == FROM_PARTS else basis


def _doubts(row: VerdictRow) -> str:
    doubts = {
        "its acceptance length is one figure, without a range": row.candidate.has_one_figure,
        "what drafting costs is unknown": not row.candidate.drafting_known,
    }
    return "".join(f"{doubt}; " for doubt, holds in doubts.items() if holds)


def _name(row: VerdictRow) -> str:
    return f"{row.candidate.predictor} with {row.candidate.nodes} nodes"


def _speed(row: VerdictRow) -> str:
    return f"{row.speed.tok_s:.1f} tokens/s ({row.speed.low_tok_s:.1f} to {row.speed.high_tok_s:.1f})"


def _turning(row: VerdictRow) -> str:
    return (
        f"it would take an acceptance length of {row.needed_length:.2f}"
        f"{_in_brackets(reach(row.needed_length, row.candidate.nodes))} at this cycle of {row.speed.cycle.ms:.1f} ms, "
        f"or a cycle of {row.needed_cycle_ms:.1f} ms at this acceptance length of {row.candidate.length.mean:.2f}"
    )


def _unknown_target(model: CycleModel) -> str:
    return f"whose answers these are is not in the file: taken as {model.hardware.target}'s"


def _has_measured_allreduces(model: CycleModel) -> bool:
    """Whether it is known how slow they are: those of a datasheet or a guess are tuned ones already."""
    return model.hardware.gpus > 1 and any(latency.basis == MEASURED for latency in model.hardware.allreduces)


def _in_brackets(remark: str) -> str:
    return f" ({remark})" if remark else ""


def _assumptions(
    model: CycleModel,
    rows: Sequence[VerdictRow],
    target: str | None,
    batch: int,
    context: int,
    temperature: float,
    text_temperatures: Collection[float | None],
) -> list[str]:
    """Everything that the verdict rests on and nobody has measured here, each once."""
    found = []
    if target is None:
        found.append(_unknown_target(model))
    elif not model.hardware.is_of(target):
        found.append(
            f"passes are those of {model.hardware.target} on {model.hardware.name}, the text is {target}'s: only what "
            "the same model accepts and costs makes a verdict"
        )
    if note := temperature_note(text_temperatures, temperature):
        found.append(note)
    plain = model.cycle(1, batch, context, temperature)
    cycles = sorted([plain, *(row.speed.cycle for row in rows)], key=lambda cycle: cycle.nodes)
    for cycle in cycles:
        if cycle.basis in (EXTRAPOLATED, FROM_PARTS):
            found.append(f"a pass of {cycle.nodes} nodes, {cycle.ms:.1f} ms, is {_how(cycle.basis)}")
        found += [*cycle.notes, *cycle.assumed]
    if model.hardware.cycles and any(not row.candidate.draft_ms and not row.candidate.published for row in rows):
        found.append("measured passes have the drafting of heads inside: a lookup is taken to take as long")
    for row in rows:
        if row.candidate.published:
            found.append(f"{row.candidate.predictor} accepts on your text what it does on its makers'")
            found += [f"{row.candidate.predictor}, {other}" for other in row.candidate.others]
    if any(row.candidate.published for row in rows):
        found.append(f"of drafters that others published: {MAKERS}")
    for drafter in drafters_for(model.hardware):
        if any(row.candidate.predictor == drafter.name for row in rows):
            size = (
                f"a drafting reads {drafter.read_bytes / 1e9:.1f} GB, {drafter.read_source}"
                if (drafter.read_bytes)
                else "what drafting costs is unknown and taken as nothing"
            )
            found.append(f"{drafter.name}: {size}")
    if _has_measured_allreduces(model):
        found.append(
            f"tuned all-reduces are as much faster as others measured at {TUNED_BYTES:,} bytes, {UNTUNED_US:g} to "
            f"{TUNED_US:g} us, at every size"
        )
    found += model.hardware.notes
    return list(dict.fromkeys(found)) or ["none: every pass was measured, or lies between two that were"]
