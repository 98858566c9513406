"""What a study has to show: tables for the terminal (Markdown, to be pasted), study.html and its pictures.

All are made from the section that `study` writes into report.json.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_k25.acceptance import BOTH, BOTH_ANSWERS, CHAIN, TREE
from medusa_k25.designs import CALM, EVERY
from medusa_k25.reports.evaluation import Gallery
from medusa_k25.reports.page import html_page, new_axes, table
from medusa_k25.reports.pictures import nodes_axis
from medusa_k25.reports.report import read_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TREE_SIZES = (9, 17, 64)  # nodes of a pass, the root included
BESIDE_SIZES = (9, 21)  # with n-gram lookup beside the heads
CURVE_NODES = 9  # of the learning curve
COLOURS = ("#1f5fa8", "#c9772b", "#3f8f5f", "#8a5fa8", "#b03a3a", "#5f8a8a", "#b08a2b", "#a85f7a", "#666666", "#7fb0e0")

Cells = Mapping[tuple[str, int, str], Mapping[str, Any]]
Point = tuple[float, float, float | None, float | None]  # x, mean, low and high of its interval
Table = tuple[str, list[str], list[list[str]]]  # title, head, rows


def cells_of(design: Mapping[str, Any]) -> dict[tuple[str, int, str], Mapping[str, Any]]:
    return {(cell["predictor"], cell["nodes"], cell["part"]): cell for cell in design["cells"]}


def tables(section: Mapping[str, Any]) -> list[Table]:
    parts, answers = section["parts"], section["answers"]
    reference = section["reference"]

    def title(part: str) -> str:
        names = {EVERY: "all of them", CALM: "those that do not end in a loop"}
        return f"Tokens a cycle on {answers:,} held-out answers: {names.get(part, part)} ({parts[part]:,})"

    shown = [part for part in (EVERY, CALM) if part in parts]
    found = [designs_table(section["designs"])]
    found += [lengths_table(title(part), section, part, _with_interval) for part in shown]
    if len(section["designs"]) > 1:
        found += [lengths_table(f"Above {reference}, {part}", section, part, _difference, free=False) for part in shown]
    found.append(lengths_table("Lowest and highest of the seeds, all answers", section, EVERY, _range, free=False))
    kinds = [part for part in parts if part not in shown]
    found += [lengths_table(title(part), section, part, _with_interval) for part in kinds]
    return found


def designs_table(designs: Sequence[Mapping[str, Any]]) -> Table:
    heads = max(len(design["top1"]) for design in designs)
    head = ["design", "seeds", "steps", "positions", "parameters M", "MFLOP a chain", "MFLOP a tree of 17"]
    head += [f"top-1 of head {k}" for k in range(1, heads + 1)]
    rows = []
    for design in designs:
        flops = {(predictor, nodes): value for predictor, nodes, value in design["drafting_mflop"]}
        chain = max((nodes for predictor, nodes in flops if predictor == CHAIN), default=0)
        costs = [flops.get((CHAIN, chain)), flops.get((TREE, 17))]
        rows.append(
            [
                design["name"],
                str(len(design["seeds"])),
                f"{design['steps']:,}",
                f"{design['positions']:,}",
                f"{design['parameters'] / 1e6:.2f}",
                *("" if value is None else f"{value:.1f}" for value in costs),
                *(f"{share:.3f}" for share in design["top1"]),
            ]
        )
    return "Designs (top-1: share of held-out labels, a label that cannot be drafted is a miss)", head, rows


def lengths_table(
    title: str, section: Mapping[str, Any], part: str, show: Callable[[Mapping[str, Any]], str], free: bool = True
) -> Table:
    """A row a design, and with `free` one for every predictor without training."""
    columns = {
        "chain": (CHAIN, 0),
        **{f"{nodes} nodes": (TREE, nodes) for nodes in TREE_SIZES},
        **{f"{nodes} with lookup": (BOTH, nodes) for nodes in BESIDE_SIZES},
        **{f"{nodes} with lookup + answers": (BOTH_ANSWERS, nodes) for nodes in BESIDE_SIZES},
    }
    rows = []
    for design in section["designs"]:
        found = cells_of(design)
        longest = max((nodes for predictor, nodes, _ in found if predictor == CHAIN), default=0)
        keys = [(predictor, nodes or longest, part) for predictor, nodes in columns.values()]
        rows.append([design["name"], *(show(found[key]) if key in found else "" for key in keys)])
    for predictor in section["training_free"] if free else []:
        found = cells_of(predictor)
        keys = [(predictor["name"], nodes if kind == TREE else 0, part) for kind, nodes in columns.values()]
        rows.append([predictor["name"], *(show(found[key]) if key in found else "" for key in keys)])
    return title, ["design", *columns], rows


def _interval(values: Sequence[float | None] | None, form: str = ".3f") -> str:
    if values is None or None in values:
        return ""
    return f" ({' to '.join(format(value, form) for value in values)})"


def _with_interval(cell: Mapping[str, Any]) -> str:
    return f"{cell['mean']:.3f}{_interval(cell['interval'])}"


def _difference(cell: Mapping[str, Any]) -> str:
    if cell["difference"] is None:
        return ""
    return f"{cell['difference']:+.3f}{_interval(cell['difference_interval'], '+.3f')}"


def _range(cell: Mapping[str, Any]) -> str:
    return f"{min(cell['runs']):.3f} to {max(cell['runs']):.3f}"


def tables_as_text(section: Mapping[str, Any]) -> str:
    return "\n\n".join(f"{title}\n\n{markdown(head, rows)}" for title, head, rows in tables(section))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_study_page(folder: Path) -> Path:
    """study.html and study_pictures/*.png in the study's folder, from its report.json."""
    section = read_report(folder)["study"]
    gallery = Gallery(folder / "study_pictures")
    most = max(design["share"] for design in section["designs"])
    compared = [design for design in section["designs"] if design["share"] == most]  # the others are points of a curve
    pictures = [
        gallery.show(
            f"nodes_{'all' if part == EVERY else 'without_loops'}",
            draw_nodes(compared, part),
            f"Tokens a cycle against the nodes that a pass verifies, trees of heads, {part}; the bands are 95% "
            "intervals over seeds and documents.",
        )
        for part in (EVERY, CALM)
        if part in section["parts"]
    ]
    curves = learning_curves(section["designs"])
    if any(len(points) > 1 for points in curves.values()):
        caption = f"Tokens a cycle of {CURVE_NODES} nodes against the positions learnt from, all answers."
        pictures.append(gallery.show("positions", draw_learning_curves(curves), caption))
    body = [
        f"<h1>{html.escape(folder.name)}</h1>",
        f'<p class="note">{html.escape(section["target"])}; held-out topics: '
        f"{html.escape(', '.join(section['topics']) or 'not named')}. Mean over seeds of the tokens that a verify pass "
        "emits; intervals (95%) are of draws of documents and of seeds. Nodes count the root.</p>",
        f'<div class="pictures">{"".join(pictures)}</div>',
    ]
    for title, head, rows in tables(section):
        body += [f"<h2>{html.escape(title)}</h2>", table(head, rows)]
    page = folder / "study.html"
    page.write_text(html_page(f"{folder.name} - what do which heads accept?", "\n".join(body)))
    return page


def draw_nodes(designs: Sequence[Mapping[str, Any]], part: str) -> "Figure":
    figure, axes = new_axes(5.4, 3.9)
    for i, design in enumerate(designs):
        some = sorted(
            (cell for cell in design["cells"] if cell["predictor"] == TREE and cell["part"] == part),
            key=lambda cell: cell["nodes"],
        )
        points = [(cell["nodes"], cell["mean"], *cell["interval"]) for cell in some]
        _draw_with_band(axes, points, COLOURS[i % len(COLOURS)], design["name"])
    nodes = [cell["nodes"] for design in designs for cell in design["cells"] if cell["predictor"] == TREE]
    nodes_axis(axes, nodes)
    axes.set_ylabel("tokens a cycle")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def learning_curves(designs: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Designs that differ in the share of the data only -> (positions, mean, low, high) of each, by positions."""
    curves: dict[str, list[Point]] = {}
    for design in sorted(designs, key=lambda design: design["positions"]):
        cell = cells_of(design).get((TREE, CURVE_NODES, EVERY))
        if cell is not None:
            name = re.sub(r"-share=[^-]*", "", design["name"])
            curves.setdefault(name, []).append((design["positions"], cell["mean"], *cell["interval"]))
    return curves


def draw_learning_curves(curves: Mapping[str, Sequence[Point]]) -> "Figure":
    figure, axes = new_axes(5.4, 3.9)
    for i, (name, points) in enumerate(curves.items()):
        _draw_with_band(axes, points, COLOURS[i % len(COLOURS)], name)
    axes.set_xscale("log")
    positions = sorted({point[0] for points in curves.values() for point in points})
    axes.set_xticks(positions, [f"{count / 1000:,.0f}K" for count in positions])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("positions learnt from")
    axes.set_ylabel(f"tokens a cycle, {CURVE_NODES} nodes")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw_with_band(axes: Any, points: Sequence[Point], colour: str, name: str) -> None:
    if not points:
        return
    x, mean, low, high = zip(*points, strict=True)
    axes.plot(x, mean, "o-", color=colour, label=name, markersize=3, linewidth=1.2)
    if None not in (*low, *high):
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
