"""What a run has to show: report.json for scripts, tables for the terminal, one self-contained page for people."""

import csv
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_k25.acceptance import Evaluation
from medusa_k25.page import html_page, picture, table, tile
from medusa_k25.pictures import (
    COLOURS,
    accepted_by_head,
    draw_acceptance,
    draw_acceptance_over_steps,
    draw_heads,
    draw_losses,
)


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
        pictures.append(picture(draw_losses(losses), "Training loss of each head."))
    if "heldout/acceptance_tree" in curves:
        caption = "Acceptance length replayed at every validation; training text: as many answers as held-out text has."
        pictures.append(picture(draw_acceptance_over_steps(curves, break_even), caption))
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
