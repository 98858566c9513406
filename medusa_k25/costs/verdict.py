"""Does it pay? Acceptance lengths and what a pass costs, made into tokens a second, and one sentence."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medusa_k25.acceptance import BOTH, Row
from medusa_k25.costs.cycle import (
    EXTRAPOLATED,
    FROM_PARTS,
    TUNED_BYTES,
    TUNED_US,
    UNTUNED_US,
    BreakEven,
    CycleModel,
    Length,
    Lever,
    Speed,
)
from medusa_k25.costs.drafters import drafters_for
from medusa_k25.costs.hardware import DEFAULT_CONTEXT
from medusa_k25.data.texts import temperature_note

PAYS, PAYS_NOT, TOO_CLOSE = "pays", "does not pay", "too close to call"
NOTHING = "none"
SHOWN_SIZES = (2, 4, 8, 16)  # whose break-even is given, besides those that are asked for


@dataclass(frozen=True)
class Candidate:
    """A predictor that verifies `nodes` tokens a pass, and what it accepts.

    published: by its makers, on their text; else replayed on yours. launch: the command that serves it. served: whether
    an engine can do it today.
    """

    predictor: str
    nodes: int
    length: Length
    draft_ms: float = 0.0
    published: bool = False
    source: str = ""
    licence: str = ""
    launch: str = ""
    served: bool = True


@dataclass(frozen=True)
class VerdictRow:
    """needed_length: at this cycle; needed_cycle_ms: at this length; from there on it pays."""

    candidate: Candidate
    speed: Speed
    outcome: str  # pays, does not pay, too close to call
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
    assumptions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """The table, the sentence, what would turn it, and every assumption."""
        where = f"{self.target} on {self.hardware}, batch {self.batch}, context {self.context:,}"
        wide = max(len("predictor"), *(len(row.candidate.predictor) for row in self.rows))
        lines = [
            f"{where}, temperature {self.temperature:g}; tokens/s are those of one request",
            f"{'predictor':<{wide}}  nodes  {'acceptance length':<23}  {'cycle':<21}  {'tokens/s':<24}  against none",
            f"{NOTHING:<{wide}}  {1:5}  {1:6.3f}{'':17}  {1000 / self.baseline_tok_s:5.1f} ms{'':13}  "
            f"{self.baseline_tok_s:7.1f}{'':17}  {1:5.2f}x",
        ]
        for row in self.rows:
            length, speed = row.candidate.length, row.speed
            lines.append(
                f"{row.candidate.predictor:<{wide}}  {row.candidate.nodes:5}  {length.mean:6.3f} "
                f"({length.low:5.3f} to {length.high:5.3f})  {speed.cycle.ms:5.1f} ms {speed.cycle.basis:<12}  "
                f"{speed.tok_s:7.1f} ({speed.low_tok_s:5.1f} to {speed.high_tok_s:5.1f})  {speed.ratio:5.2f}x "
                f"{row.outcome}{', published' if row.candidate.published else ''}"
                f"{'' if row.candidate.served else ', replayed only'}"
            )
        lines += ["", self.sentence, "", "acceptance length from which speculation pays"]
        if any(each.basis == FROM_PARTS for each in self.break_even):
            lines[-1] += ", if drafting took no time"
        lines += [
            f"  {each.nodes:3} nodes: {each.length:.2f} ({each.low:.2f} to {each.high:.2f}) at {each.cycle_ms:.1f} ms, "
            f"{each.basis}"
            for each in self.break_even
        ]
        if self.levers:
            lines += [
                f"the same with {self.levers[0][1].name} (in brackets: against today's {self.baseline_tok_s:.0f} "
                "tokens/s without speculation, which get faster, too)"
            ]
        lines += [
            f"  {nodes:3} nodes: {lever.break_even:.2f} ({lever.break_even_today:.2f}) at {lever.cycle_ms:.1f} ms, "
            f"{lever.baseline_tok_s:.0f} tokens/s without speculation"
            for nodes, lever in self.levers
        ]
        if published := [row.candidate for row in self.rows if row.candidate.published]:
            lines += ["", "drafters that others published: their acceptance lengths are of other text"]
        for candidate in published:
            lines += [f"  {candidate.predictor}, licence {candidate.licence}: {candidate.source}"]
            lines += [f"    {candidate.launch}"]
        lines += ["", "assumptions", *(f"  - {assumption}" for assumption in self.assumptions)]
        return "\n".join(lines)


def fastest_candidates(
    rows: Sequence[Row],
    model: CycleModel,
    draft_ms: Mapping[str, float],
    batch: int = 1,
    context: int = DEFAULT_CONTEXT,
    temperature: float = 0.0,
) -> list[Candidate]:
    """Each predictor with as many nodes as are fastest on calibration text, and what it accepts on held-out text.

    draft_ms: by predictor; 0 where it has none.
    """
    candidates = []
    for predictor in dict.fromkeys(row.predictor for row in rows):
        drafting = draft_ms.get(predictor, 0.0)
        best = max(
            (row for row in rows if row.predictor == predictor),
            key=lambda row: (
                row.calibration.length / model.cycle(row.num_nodes, batch, context, temperature, drafting).ms
            ),
        )
        candidates.append(
            Candidate(
                predictor,
                best.num_nodes,
                Length.around(best.every.length, best.interval),
                drafting,
                served=predictor != BOTH,
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
        )
        for drafter in drafters_for(model.hardware)
    ]


def judge(
    model: CycleModel,
    candidates: Sequence[Candidate],
    target: str,
    batch: int = 1,
    context: int = DEFAULT_CONTEXT,
    temperature: float = 0.0,
    text_temperatures: Collection[float | None] = (None,),
) -> Verdict:
    """`target`: whose text was replayed, by its name on the hub. `text_temperatures`: at which that text was sampled,
    None: unknown.

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
        outcome = PAYS if speed.low_tok_s > baseline else PAYS_NOT if speed.high_tok_s < baseline else TOO_CLOSE
        rows.append(
            VerdictRow(
                candidate,
                speed,
                outcome,
                needed_length=speed.cycle.ms * baseline / 1000,
                needed_cycle_ms=1000 * candidate.length.mean / baseline,
            )
        )
    rows.sort(key=lambda row: -row.speed.tok_s)
    sizes = sorted({*SHOWN_SIZES, *(candidate.nodes for candidate in candidates)})
    levers = []
    if model.hardware.gpus > 1:
        levers = [(n, model.faster_allreduces(n, TUNED_US / UNTUNED_US, batch, context, temperature)) for n in sizes]
    return Verdict(
        hardware=model.hardware.name,
        target=target,
        batch=batch,
        context=context,
        temperature=temperature,
        baseline_tok_s=baseline,
        rows=tuple(rows),
        sentence=_sentence(rows, baseline),
        break_even=tuple(model.break_even(n, batch, context, temperature) for n in sizes),
        levers=tuple(levers),
        assumptions=tuple(_assumptions(model, rows, target, batch, context, temperature, text_temperatures)),
    )


def _sentence(rows: Sequence[VerdictRow], baseline: float) -> str:
    """Of rows that are sorted by tokens a second; what no engine serves comes at the end."""
    replayed = [row for row in rows if not row.candidate.served]
    rows = [row for row in rows if row.candidate.served] or rows
    best = rows[0]
    paying = [row for row in rows if row.outcome == PAYS]
    if best.outcome == PAYS:
        text = (
            f"{_name(best)} pays: {_speed(best)} against {baseline:.1f} without speculation, {best.speed.ratio:.2f}x."
        )
    elif paying:
        text = (
            f"{_name(paying[0])} pays: {_speed(paying[0])} against {baseline:.1f} without speculation, "
            f"{paying[0].speed.ratio:.2f}x; {_name(best)} may be faster, but is too close to call: {_speed(best)}."
        )
    elif best.outcome == TOO_CLOSE:
        text = (
            f"Too close to call: the best is {_name(best)} at {_speed(best)}, and {baseline:.1f} without speculation "
            f"lies inside; {_turning(best)}."
        )
    else:
        text = f"Nothing pays: the best is {_name(best)} at {_speed(best)} against {baseline:.1f}; {_turning(best)}."
    said = best if best.outcome == PAYS or not paying else paying[0]
    if said.candidate.published:
        text += " Its acceptance length is its makers', on their text: measure it on yours."
        own = next((row for row in rows if not row.candidate.published), None)
        if own is not None:
            more = "" if own.outcome == PAYS else f"; {_turning(own)}"
            text += f" The best on your own text is {_name(own)} at {_speed(own)}: {own.outcome}{more}."
    if replayed and replayed[0].speed.tok_s > best.speed.tok_s:
        text += (
            f" {_name(replayed[0])} would be faster, {_speed(replayed[0])}: {replayed[0].outcome}; it is replayed "
            "only, no engine serves it yet."
        )
    return text


def _name(row: VerdictRow) -> str:
    return f"{row.candidate.predictor} with {row.candidate.nodes} nodes"


def _speed(row: VerdictRow) -> str:
    return f"{row.speed.tok_s:.1f} tokens/s ({row.speed.low_tok_s:.1f} to {row.speed.high_tok_s:.1f})"


def _turning(row: VerdictRow) -> str:
    return (
        f"it would take an acceptance length of {row.needed_length:.2f} at this cycle of {row.speed.cycle.ms:.1f} ms, "
        f"or a cycle of {row.needed_cycle_ms:.1f} ms at this acceptance length of {row.candidate.length.mean:.2f}"
    )


def _assumptions(
    model: CycleModel,
    rows: Sequence[VerdictRow],
    target: str,
    batch: int,
    context: int,
    temperature: float,
    text_temperatures: Collection[float | None],
) -> list[str]:
    """Everything that the verdict rests on and nobody has measured here, each once."""
    found = []
    if not model.hardware.is_of(target):
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
            how = "put together from parts" if cycle.basis == FROM_PARTS else cycle.basis
            found.append(f"a pass of {cycle.nodes} nodes, {cycle.ms:.1f} ms, is {how}")
        found += [*cycle.notes, *cycle.assumed]
    if model.hardware.cycles and any(not row.candidate.draft_ms and not row.candidate.published for row in rows):
        found.append("measured passes have the drafting of heads inside: a lookup is taken to take as long")
    for row in rows:
        if row.candidate.published:
            found.append(f"{row.candidate.predictor} accepts on your text what it does on its makers'")
    for drafter in drafters_for(model.hardware):
        if any(row.candidate.predictor == drafter.name for row in rows):
            size = (
                f"a drafting reads {drafter.read_bytes / 1e9:.1f} GB, {drafter.read_source}"
                if (drafter.read_bytes)
                else "what drafting costs is unknown and taken as nothing"
            )
            found.append(f"{drafter.name}: {size}")
    if model.hardware.gpus > 1:
        found.append(
            f"tuned all-reduces are as much faster as others measured at {TUNED_BYTES:,} bytes, {UNTUNED_US:g} to "
            f"{TUNED_US:g} us, at every size"
        )
    found += model.hardware.notes
    return list(dict.fromkeys(found)) or ["none: every pass was measured, or lies between two that were"]
