"""What a run has to show: report.json for scripts, tables for the terminal, one self-contained page for people."""

import html
import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_k25.acceptance import Evaluation

COLOURS = {"heads, tree": "#1f5fa8", "untrained heads, tree": "#9a9a9a", "n-gram lookup": "#c9772b"}
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
    tiles = [_tile("held-out answers", f"{evaluation['answers']}", f"{evaluation['loops']} end in a loop")]
    size = report.get("export", {}).get("nodes", 9)
    for predictor in ("heads, tree", "untrained heads, tree", "n-gram lookup"):
        row = next((row for row in rows if (row["predictor"], row["num_nodes"]) == (predictor, size)), None)
        if row:
            low, high = row["interval"]
            tiles.append(
                _tile(f"{predictor}, {size} nodes", f"{row['every']['length']:.2f}", f"95%: {low:.2f} to {high:.2f}")
            )
    if decode:
        same = decode["prompts"] - len(decode["other_output"])
        note = "counts equal replay's" if not decode["other_counts"] else "counts differ from replay's"
        tiles.append(_tile("answers equal to greedy", f"{same} of {decode['prompts']}", note))

    pictures = [
        _figure(_acceptance_by_nodes(rows), "Tokens emitted a verify pass against tokens verified, on held-out text."),
        _figure(_accuracy_by_head(evaluation["accuracy"]), "Share of held-out labels among each head's best choices."),
    ]
    curves = _curves(run_dir / "metrics.csv")
    pictures += [_figure(svg, caption) for svg, caption in curves]
    body = "\n".join(
        [
            f"<h1>{html.escape(run_dir.name)}</h1>",
            f'<p class="note">checkpoint {html.escape(evaluation["checkpoint"])}</p>',
            f'<div class="tiles">{"".join(tiles)}</div>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            _table(rows),
        ]
    )
    page = run_dir / "report.html"
    page.write_text(PAGE.replace("TITLE", html.escape(run_dir.name)).replace("BODY", body))
    return page


def _tile(what: str, value: str, note: str) -> str:
    return f'<div class="tile"><span>{html.escape(what)}</span><b>{value}</b><span>{html.escape(note)}</span></div>'


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        low, high = row["interval"]
        cells = [
            f"{row['every']['length']:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{row['without_loops']['length']:.3f}",
            f"{row['every']['passes_saved']:.1%}",
        ]
        numbers = "".join(f"<td>{cell}</td>" for cell in [str(row["num_nodes"]), *cells])
        lines.append(f"<tr><th>{html.escape(row['predictor'])}</th>{numbers}</tr>")
    head = "".join(
        f"<th>{name}</th>"
        for name in ("predictor", "nodes", "acceptance length", "95% interval", "without loops", "passes saved")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _axes(width: float = 5.4, height: float = 3.4) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?<svg", "<svg", buffer.getvalue(), count=1, flags=re.DOTALL)


def _acceptance_by_nodes(rows: Sequence[Mapping[str, Any]]) -> str:
    figure, axes = _axes()
    for predictor, colour in COLOURS.items():
        some = [row for row in rows if row["predictor"] == predictor]
        nodes = [row["num_nodes"] for row in some]
        axes.plot(nodes, [row["every"]["length"] for row in some], "o-", color=colour, label=predictor, markersize=4)
        low, high = zip(*(row["interval"] for row in some), strict=True)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    sizes = sorted({row["num_nodes"] for row in rows if row["predictor"] in COLOURS})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("nodes verified in a pass (root included)")
    axes.set_ylabel("acceptance length")
    axes.legend(frameon=False)
    return _svg(figure)


def _accuracy_by_head(accuracy: Sequence[Sequence[float]]) -> str:
    figure, axes = _axes()
    for r in reversed(range(len(accuracy[0]))):
        shares = [head[r] for head in accuracy]
        bars = axes.bar(range(1, len(accuracy) + 1), shares, color=HEAD_COLOURS[r], label=f"top-{r + 1}", width=0.7)
        if r == 0:
            axes.bar_label(bars, [f"{share:.2f}" for share in shares], label_type="center", color="white", fontsize=9)
    axes.set_xticks(range(1, len(accuracy) + 1))
    axes.set_xlabel("head")
    axes.set_ylabel("share of labels")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False)
    return _svg(figure)


def _curves(metrics_csv: Path) -> list[tuple[str, str]]:
    if not metrics_csv.exists():
        return []
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in metrics_csv.read_text().splitlines()[1:]:
        step, metric, value = line.split(",")
        series[metric].append((int(step), float(value)))
    pictures = []
    losses = sorted(metric for metric in series if metric.startswith("train/loss_head"))
    if losses:
        figure, axes = _axes()
        for k, metric in enumerate(losses):
            axes.plot(*zip(*series[metric], strict=True), color=HEAD_COLOURS[k], label=f"head {k + 1}", linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel("cross-entropy, training")
        axes.legend(frameon=False)
        pictures.append((_svg(figure), "Training loss of each head."))
    replayed = {
        "heldout/acceptance_tree": ("held-out, tree", "#1f5fa8", "-"),
        "heldout/acceptance_chain": ("held-out, chain", "#5b93cc", "-"),
        "calibration/acceptance_tree": ("calibration, tree", "#1f5fa8", ":"),
        "calibration/acceptance_chain": ("calibration, chain", "#5b93cc", ":"),
    }
    if set(replayed) <= set(series):
        figure, axes = _axes()
        for metric, (label, colour, style) in replayed.items():
            axes.plot(*zip(*series[metric], strict=True), style, color=colour, label=label, marker="o", markersize=3)
        axes.set_xlabel("step")
        axes.set_ylabel("acceptance length")
        axes.legend(frameon=False)
        pictures.append((_svg(figure), "Acceptance length replayed at every validation."))
    return pictures


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE - acceptance report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fafafa; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
.note { color: #666; margin: .2rem 0 1.2rem; overflow-wrap: anywhere }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem }
.tile { background: white; border: 1px solid #e4e4e4; border-radius: 8px; padding: .7rem 1rem; flex: 1 1 10rem;
        display: flex; flex-direction: column }
.tile b { font-size: 1.7rem; line-height: 1.3 }
.tile span { color: #666; font-size: .85rem }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: .8rem; margin: .8rem 0 }
figure { background: white; border: 1px solid #e4e4e4; border-radius: 8px; margin: 0; padding: .7rem }
figure svg { width: 100%; height: auto }
figcaption { color: #666; font-size: .85rem }
table { background: white; border: 1px solid #e4e4e4; border-collapse: collapse; width: 100% }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #eee }
th:first-child { text-align: left }
tbody th { font-weight: normal }
</style></head><body>
BODY
</body></html>
"""
