"""What a run has to show: report.json for scripts, tables for the terminal. evaluation.py draws it for people."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_k25.acceptance import CORPUS, NGRAM_LOOKUP, TREE, Evaluation


def update_report(run_dir: Path, section: str, content: Mapping[str, Any]) -> None:
    """Set one verb's section of the run's report.json, by rename: a reader never sees half a file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    report = read_report(run_dir) | {section: dict(content)}
    part = run_dir / "report.json.part"
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.rename(run_dir / "report.json")


def read_report(run_dir: Path) -> dict[str, Any]:
    file = run_dir / "report.json"
    if not file.exists():
        return {}
    try:
        report = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged ({error}); move it away: every verb writes its own section again"
        ) from None
    if not isinstance(report, dict):
        raise ValueError(f"{file} is no report of this project; move it away, or choose another name=")
    return report


def acceptance_table(evaluation: Evaluation) -> str:
    """The evaluation as text: accuracy a head, then acceptance length a predictor and size."""
    lines: list[str] = []
    if evaluation.accuracy_KR:
        lines += [
            "share of held-out labels among a head's best choices (a label that it cannot draft is a miss)",
            f"{'head':<24}" + "".join(f"{f'top-{r}':>8}" for r in range(1, len(evaluation.accuracy_KR[0]) + 1)),
        ]
    for k, shares in enumerate(evaluation.accuracy_KR, start=1):
        lines.append(f"{k:<24}" + "".join(f"{share:>8.3f}" for share in shares))

    sizes = sorted({row.num_nodes for row in evaluation.rows})
    predictors = list(dict.fromkeys(row.predictor for row in evaluation.rows))
    cells = {(row.predictor, row.num_nodes): row for row in evaluation.rows}
    wide = max(24, *(len(predictor) + 2 for predictor in predictors))
    topics = f", of {evaluation.topics} topics" if evaluation.topics else ""
    for title, which in (
        (f"all {evaluation.answers} held-out answers{topics}", lambda row: row.every),
        (f"the {evaluation.answers - evaluation.loops} that do not end in a loop", lambda row: row.without_loops),
    ):
        lines += ["", f"acceptance length (tokens emitted a verify pass) on {title}"]
        lines.append(f"{'nodes verified a pass':<{wide}}" + "".join(f"{size:>7}" for size in sizes))
        for predictor in predictors:
            values = [cells.get((predictor, size)) for size in sizes]
            lines.append(
                f"{predictor:<{wide}}" + "".join(f"{which(row).length:>7.3f}" if row else " " * 7 for row in values)
            )
    return "\n".join(lines)


def summary(run_dir: Path) -> str:
    """The run in a few lines, from what the verbs left in report.json."""
    report = read_report(run_dir)
    lines = []
    if "evaluate" in report and "export" in report:
        nodes = report["export"]["nodes"]
        if accuracy := report["evaluate"]["accuracy"]:
            top1 = ", ".join(f"{head[0]:.3f}" for head in accuracy)
            lines.append(f"top-1 accuracy of heads 1 to {len(accuracy)} on held-out text: {top1}")
        for row in report["evaluate"]["rows"]:
            if row["num_nodes"] == nodes and row["predictor"] in (TREE, CORPUS, NGRAM_LOOKUP):
                low, high = row["interval"]
                lines.append(
                    f"acceptance length, {nodes} nodes, {row['predictor'] + ':':<28} {row['every']['length']:.3f} "
                    f"({low:.3f} to {high:.3f}), {row['every']['passes_saved']:.1%} of the passes saved"
                )
    if "evaluate" in report:
        lines.append(report["evaluate"]["verdict"]["sentence"])
    if "export" in report:
        lines.append(f"exported heads: {report['export']['folder']}")
    if (run_dir / "report.html").exists():
        lines.append(f"report:         {run_dir / 'report.html'}")
    return "\n".join(lines)


def read_curves(metrics_csv: Path) -> dict[str, list[tuple[int, float]]]:
    """metric -> [(step, value), ...] of a metrics.csv; empty where there is none."""
    curves: dict[str, list[tuple[int, float]]] = {}
    if metrics_csv.exists():
        with metrics_csv.open(newline="") as file:
            for row in csv.DictReader(file):
                curves.setdefault(row["metric"], []).append((int(row["step"]), float(row["value"])))
    return curves
