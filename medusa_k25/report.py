"""What a run has to show: report.json for scripts, tables for the terminal, one self-contained page for people."""

import csv
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_k25.acceptance import Evaluation
from medusa_k25.page import html_page, new_axes, picture, table, tile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"heads, tree": "#1f5fa8", "n-gram lookup": "#c9772b"}
TEXT_COLOURS = {"heldout": "#1f5fa8", "calibration": "#9a9a9a", "train": "#3f8f5f"}
HEAD_COLOURS = ("#12365f", "#1f5fa8", "#5b93cc", "#a5c4e4", "#c9d9ea", "#dde6ef", "#e8eef4", "#f0f4f8")


def update_report(run_dir: Path, section: str, content: Mapping[str, Any]) -> None:
    """Set one verb's section of the run's report.json, by rename: a reader never sees half a file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    report = read_report(run_dir) | {section: dict(content)}
    part = run_dir / "report.json.part"
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.rename(run_dir / "report.json")


def read_report(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "report.json"
    return json.loads(file.read_text()) if file.exists() else {}


def acceptance_table(evaluation: Evaluation) -> str:
    """The evaluation as text: accuracy a head, then acceptance length a predictor and size."""
    lines = [
        "share of held-out labels among a head's best choices (a label that it cannot draft is a miss)",
        f"{'head':<24}" + "".join(f"{f'top-{r}':>8}" for r in range(1, len(evaluation.accuracy_KR[0]) + 1)),
    ]
    for k, shares in enumerate(evaluation.accuracy_KR, start=1):
        lines.append(f"{k:<24}" + "".join(f"{share:>8.3f}" for share in shares))

    sizes = sorted({row.num_nodes for row in evaluation.rows})
    predictors = list(dict.fromkeys(row.predictor for row in evaluation.rows))
    cells = {(row.predictor, row.num_nodes): row for row in evaluation.rows}
    for title, which in (
        (f"all {evaluation.answers} held-out answers", lambda row: row.every),
        (f"the {evaluation.answers - evaluation.loops} that do not end in a loop", lambda row: row.without_loops),
    ):
        lines += ["", f"acceptance length (tokens emitted a verify pass) on {title}"]
        lines.append(f"{'nodes verified a pass':<24}" + "".join(f"{size:>8}" for size in sizes))
        for predictor in predictors:
            values = [cells.get((predictor, size)) for size in sizes]
            lines.append(
                f"{predictor:<24}" + "".join(f"{which(row).length:>8.3f}" if row else " " * 8 for row in values)
            )
    return "\n".join(lines)


def summary(run_dir: Path) -> str:
    """The run in a few lines, from what the verbs left in report.json."""
    report = read_report(run_dir)
    lines = []
    if "evaluate" in report and "export" in report:
        nodes = report["export"]["nodes"]
        top1 = ", ".join(f"{head[0]:.3f}" for head in report["evaluate"]["accuracy"])
        lines.append(f"top-1 accuracy of heads 1 to {len(report['evaluate']['accuracy'])} on held-out text: {top1}")
        for row in report["evaluate"]["rows"]:
            if row["num_nodes"] == nodes and row["predictor"] in COLOURS:
                low, high = row["interval"]
                lines.append(
                    f"acceptance length, {nodes} nodes, {row['predictor'] + ':':<22} {row['every']['length']:.3f} "
                    f"({low:.3f} to {high:.3f}), {row['every']['passes_saved']:.1%} of the passes saved"
                )
    if "export" in report:
        lines.append(f"exported heads: {report['export']['folder']}")
    if (run_dir / "report.html").exists():
        lines.append(f"report:         {run_dir / 'report.html'}")
    return "\n".join(lines)


def write_page(run_dir: Path) -> Path:
    """report.html from the run's report.json and metrics.csv: one file, no network, pictures inside."""
    report = read_report(run_dir)
    evaluation, decode = report["evaluate"], report.get("decode")
    rows = evaluation["rows"]
    curves = read_curves(run_dir / "metrics.csv")
    break_even = curves["break_even"][-1][1] if "break_even" in curves else None
    tiles = [tile("held-out answers", f"{evaluation['answers']}", f"{evaluation['loops']} end in a loop")]
    nodes = report.get("export", {}).get("nodes", 9)
    size = min((row["num_nodes"] for row in rows if row["tree"]), key=lambda evaluated: abs(evaluated - nodes))
    for predictor in COLOURS:
        row = next((row for row in rows if (row["predictor"], row["num_nodes"]) == (predictor, size)), None)
        if row:
            low, high = row["interval"]
            tiles.append(
                tile(f"{predictor}, {size} nodes", f"{row['every']['length']:.2f}", f"95%: {low:.2f} to {high:.2f}")
            )
    if break_even is not None:
        tiles.append(tile("break-even", f"{break_even:.2f}", "acceptance length at which speculation pays"))
    if decode:
        same = decode["prompts"] - len(decode["other_output"])
        note = "counts equal replay's" if not decode["other_counts"] else "counts differ from replay's"
        tiles.append(tile("answers equal to greedy", f"{same} of {decode['prompts']}", note))

    pictures = [
        picture(
            draw_acceptance(rows, break_even),
            "Tokens emitted a verify pass against tokens verified, on held-out text, with 95% intervals.",
        ),
        picture(
            draw_heads(evaluation["accuracy"], accepted_by_head(rows, size)),
            "Share of held-out labels among each head's best choices, and of the verify passes that accept its draft.",
        ),
    ]
    losses = [curves[metric] for metric in sorted(curves) if metric.startswith("train/loss_head")]
    if losses:
        pictures.append(picture(_draw_losses(losses), "Training loss of each head."))
    if "heldout/acceptance_tree" in curves:
        caption = "Acceptance length replayed at every validation; training text: as many answers as held-out text has."
        pictures.append(picture(_draw_acceptance_over_steps(curves, break_even), caption))
    body = "\n".join(
        [
            f"<h1>{html.escape(run_dir.name)}</h1>",
            f'<p class="note">checkpoint {html.escape(evaluation["checkpoint"])}</p>',
            f'<div class="tiles">{"".join(tiles)}</div>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            *_labels(report.get("train", {}).get("metrics", {})),
            "<h2>Every predictor and tree size</h2>",
            table(
                ("predictor", "nodes", "acceptance length", "95% interval", "without loops", "passes saved"),
                [_cells(row) for row in rows],
            ),
        ]
    )
    page = run_dir / "report.html"
    page.write_text(html_page(f"{run_dir.name} - acceptance report", body))
    return page


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["interval"]
    return [
        row["predictor"],
        str(row["num_nodes"]),
        f"{row['every']['length']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{row['without_loops']['length']:.3f}",
        f"{row['every']['passes_saved']:.1%}",
    ]


def _labels(metrics: Mapping[str, float]) -> list[str]:
    """What the best checkpoint accepted on the held-out text of each label; nothing where no conversation has one."""
    tree, chain = "heldout/acceptance_tree", "heldout/acceptance_chain"
    labels = [metric.removeprefix(f"{tree}/") for metric in metrics if metric.startswith(f"{tree}/")]
    if not labels:
        return []
    rows = [[label, f"{metrics[f'{tree}/{label}']:.3f}", f"{metrics[f'{chain}/{label}']:.3f}"] for label in labels]
    rows.append(["all held-out text", f"{metrics[tree]:.3f}", f"{metrics[chain]:.3f}"])
    return ["<h2>By label, best checkpoint</h2>", table(("label", "acceptance length, tree", "chain"), rows)]


def read_curves(metrics_csv: Path) -> dict[str, list[tuple[int, float]]]:
    """metric -> [(step, value), ...] of a metrics.csv; empty where there is none."""
    curves: dict[str, list[tuple[int, float]]] = {}
    if metrics_csv.exists():
        with metrics_csv.open(newline="") as file:
            for row in csv.DictReader(file):
                curves.setdefault(row["metric"], []).append((int(row["step"]), float(row["value"])))
    return curves


def accepted_by_head(rows: Sequence[Mapping[str, Any]], num_nodes: int) -> list[float]:
    """Share of the verify passes that accept drafts of heads 1 to k, for every k; from an evaluation's rows as JSON."""
    row = next((row for row in rows if (row["predictor"], row["num_nodes"]) == ("heads, tree", num_nodes)), None)
    if row is None:
        return []
    accepted = {int(drafts): count for drafts, count in row["every"]["accepted"].items()}
    deepest = max(map(len, row["tree"]), default=0)
    return [
        sum(count for drafts, count in accepted.items() if drafts >= k) / row["every"]["passes"]
        for k in range(1, deepest + 1)
    ]


def _draw_break_even(axes: "Axes", break_even: float | None) -> None:
    if break_even is not None:
        axes.axhline(break_even, linestyle="--", color="#b03a3a", linewidth=1.2, label=f"break-even, {break_even:g}")


def draw_acceptance(rows: Sequence[Mapping[str, Any]], break_even: float | None) -> "Figure":
    """Acceptance length of every predictor against the size of its trees; `rows` of an evaluation as JSON."""
    figure, axes = new_axes()
    for predictor, colour in COLOURS.items():
        some = [row for row in rows if row["predictor"] == predictor]
        nodes = [row["num_nodes"] for row in some]
        axes.plot(nodes, [row["every"]["length"] for row in some], "o-", color=colour, label=predictor, markersize=4)
        low, high = zip(*(row["interval"] for row in some), strict=True)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.12, linewidth=0)
    _draw_break_even(axes, break_even)
    axes.set_xscale("log", base=2)
    sizes = sorted({row["num_nodes"] for row in rows if row["predictor"] in COLOURS})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("nodes verified in a pass (root included)")
    axes.set_ylabel("acceptance length")
    axes.legend(edgecolor="none")
    return figure


def draw_heads(accuracy_KR: Sequence[Sequence[float]], accepted_K: Sequence[float]) -> "Figure":
    """Each head's top-1 to top-R accuracy, and how many of the verify passes accept a draft of its depth."""
    figure, axes = new_axes()
    for r in reversed(range(len(accuracy_KR[0]))):
        shares = [head[r] for head in accuracy_KR]
        bars = axes.bar(range(1, len(accuracy_KR) + 1), shares, color=HEAD_COLOURS[r], label=f"top-{r + 1}", width=0.7)
        if r == 0:
            axes.bar_label(bars, [f"{share:.2f}" for share in shares], label_type="center", color="white", fontsize=9)
    if accepted_K:
        axes.plot(range(1, len(accepted_K) + 1), accepted_K, "D-", color="#c9772b", label="accepted", markersize=4)
    axes.set_xticks(range(1, len(accuracy_KR) + 1))
    axes.set_xlabel("head")
    axes.set_ylabel("share")
    figure.legend(loc="outside right upper", reverse=True, frameon=False)
    return figure


def _draw_losses(losses: Sequence[Sequence[tuple[int, float]]]) -> "Figure":
    figure, axes = new_axes()
    for k, loss in enumerate(losses):
        axes.plot(*zip(*loss, strict=True), color=HEAD_COLOURS[k], label=f"head {k + 1}", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, training")
    axes.legend(frameon=False)
    return figure


def _draw_acceptance_over_steps(
    curves: Mapping[str, Sequence[tuple[int, float]]], break_even: float | None
) -> "Figure":
    figure, axes = new_axes()
    for text, colour in TEXT_COLOURS.items():
        for shape, style in (("tree", "-"), ("chain", ":")):
            curve = curves.get(f"{text}/acceptance_{shape}")
            if curve:
                axes.plot(
                    *zip(*curve, strict=True), style, color=colour, label=f"{text}, {shape}", marker="o", markersize=3
                )
    _draw_break_even(axes, break_even)
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length")
    figure.legend(loc="outside right upper", frameon=False)
    return figure
