"""report.html: does it pay, what accepts how much, and where. One file, no network, pictures inside.

Made from the run's report.json and metrics.csv; the pictures also lie beside it, as PNG.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_k25.costs.cycle import reach
from medusa_k25.costs.verdict import TYPES_SAID
from medusa_k25.reports.page import html_page, picture, table, tile
from medusa_k25.reports.pictures import (
    accepted_by_head,
    break_even_of,
    draw_acceptance,
    draw_acceptance_over_steps,
    draw_depths,
    draw_heads,
    draw_losses,
    draw_overfitting,
    draw_shares,
    draw_speed,
    draw_tree,
)
from medusa_k25.reports.report import read_curves, read_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS = 14
FEW_PASSES = 200  # of a part of the text: below, its bar says little


class Gallery:
    """Figures of a page, each written as a PNG, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def show(self, name: str, figure: "Figure", caption: str) -> str:
        figure.savefig(self.folder / f"{name}.png", dpi=150)
        return picture(figure, caption)


def write_page(run_dir: Path, section: str = "evaluate") -> Path:
    """report.html and pictures/*.png in the run's folder; of another section, SECTION.html and SECTION_pictures."""
    report, curves = read_report(run_dir), read_curves(run_dir / "metrics.csv")
    about_heads = section == "evaluate"
    if not about_heads:
        curves = {}
    evaluation = report[section]
    gallery = Gallery(run_dir / ("pictures" if about_heads else f"{section}_pictures"))
    verdict = evaluation["verdict"]
    source = " ".join(f"{key} {evaluation[key]}" for key in ("checkpoint", "conversations") if key in evaluation)
    body = "\n".join(
        [
            f"<h1>{html.escape(run_dir.name)}</h1>",
            f'<p class="note">{html.escape(source or "predictors that need no training")}</p>',
            f'<p class="verdict">{html.escape(verdict["sentence"])}</p>',
            *another_target_section(evaluation),
            f'<div class="tiles">{"".join(tiles(evaluation, report.get("decode") if about_heads else None))}</div>',
            "<h2>Does it pay?</h2>",
            f'<p class="note">{html.escape(place_of(verdict))}</p>',
            verdict_table(verdict),
            '<p class="note">"pays from": the acceptance length that it would take at this cycle, or the cycle that it '
            "would take at this acceptance length.</p>",
            f'<div class="pictures">{"".join(speed_pictures(evaluation, gallery))}</div>',
            *break_even_section(verdict),
            *types_section(verdict),
            *adaptive_section(evaluation.get("adaptive")),
            *notes_section(verdict),
            *accuracy_section(evaluation, gallery),
            *breakdown_section(evaluation["breakdown"], gallery),
            *training_section(curves, report.get("train", {}).get("metrics", {}) if about_heads else {}, gallery),
            "<h2>Every predictor and size</h2>",
            table(
                ("predictor", "nodes", "acceptance length", "95% interval", "without loops", "on calibration text"),
                [cells(row) for row in evaluation["rows"]],
            ),
        ]
    )
    page = run_dir / ("report.html" if about_heads else f"{section}.html")
    page.write_text(html_page(f"{run_dir.name} - does speculation pay?", body))
    return page


def another_target_section(evaluation: Mapping[str, Any]) -> list[str]:
    if (advice := evaluation.get("another_target")) is None:
        return []
    said, rule = html.escape(advice["sentence"]), html.escape(advice["rule"])
    return [f'<p class="verdict">{said}</p>', f'<p class="note">The rule: {rule}.</p>']


def place_of(verdict: Mapping[str, Any]) -> str:
    return (
        f"{verdict['target']} on {verdict['hardware']}, batch {verdict['batch']}, {verdict['context']:,} tokens of "
        f"context, temperature {verdict['temperature']:g}. Tokens/s are those of one request."
        + "".join(f" Heads are {each['name']} ones." for each in verdict["types"] if each["chosen"])
    )


def tiles(evaluation: Mapping[str, Any], decode: Mapping[str, Any] | None) -> list[str]:
    verdict = evaluation["verdict"]
    baseline, loops, topics = verdict["baseline_tok_s"], evaluation["loops"], evaluation["topics"]
    of_topics = f"of {topics} topics, " if topics else ""
    found = [
        tile("held-out answers", f"{evaluation['answers']:,}", f"{of_topics}{loops} end in a loop"),
        tile("without speculation", f"{baseline:.1f}", "tokens/s"),
    ]
    for row in verdict["rows"][:3]:
        speed, candidate = row["speed"], row["candidate"]
        found.append(
            tile(
                f"{candidate['predictor']}, {candidate['nodes']} nodes",
                f"{speed['tok_s']:.1f}",
                f"tokens/s, {speed['tok_s'] / baseline:.2f} times: {row['outcome']}",
            )
        )
    if decode:
        same = decode["prompts"] - len(decode["other_output"])
        note = "counts equal replay's" if not decode["other_counts"] else "counts differ from replay's"
        found.append(tile("answers equal to greedy", f"{same} of {decode['prompts']}", note))
    return found


def verdict_table(verdict: Mapping[str, Any]) -> str:
    rows = []
    for row in verdict["rows"]:
        candidate, speed = row["candidate"], row["speed"]
        cycle = speed["cycle"]
        remark = "published" if candidate["published"] else ""
        rows.append(
            [
                candidate["predictor"],
                str(candidate["nodes"]),
                row["length"],
                f"{cycle['ms']:.1f} ms, {cycle['basis']}",
                f"{speed['tok_s']:.1f} ({speed['low_tok_s']:.1f} to {speed['high_tok_s']:.1f})",
                f"{speed['tok_s'] / verdict['baseline_tok_s']:.2f}",
                f"{row['outcome']}{f', {remark}' if remark else ''}",
                f"{row['needed_length']:.2f} or {row['needed_cycle_ms']:.1f} ms",
            ]
        )
    head = ("predictor", "nodes", "acceptance length", "cycle", "tokens/s", "against none", "verdict", "pays from")
    return table(head, rows)


def break_even_section(verdict: Mapping[str, Any]) -> list[str]:
    """From which acceptance length on a pass of so many nodes pays, and what faster all-reduces would make of it."""
    levers = dict(verdict["levers"])
    rows = []
    for each in verdict["break_even"]:
        lever = levers.get(each["nodes"])
        faster = ["", ""] if lever is None else [f"{lever['cycle_ms']:.1f} ms", f"{lever['break_even']:.2f}"]
        rows.append(
            [
                str(each["nodes"]),
                f"{each['cycle_ms']:.1f} ms, {each['basis']}",
                f"{each['length']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
                + (f", {remark}" if (remark := reach(each["length"], each["nodes"])) else ""),
                *(faster if levers else []),
            ]
        )
    head = ["nodes", "cycle", "pays from an acceptance length of"]
    if levers:
        name = verdict["levers"][0][1]["name"]
        head += [f"cycle with {name}", "pays from"]
    return ["<h2>From which acceptance length on</h2>", table(head, rows)]


def types_section(verdict: Mapping[str, Any]) -> list[str]:
    """What drafting takes and what it needs, by type of heads; nothing where there are no heads."""
    if not verdict["types"]:
        return []
    rows = []
    for kind in verdict["types"]:
        for size in kind["sizes"]:
            drafted = size["drafting"]
            rows.append(
                [
                    f"{kind['name']}{' (these heads)' if kind['chosen'] else ''}",
                    str(drafted["nodes"]),
                    f"{drafted['parameters'] / 1e6:.1f} M",
                    f"{drafted['read_bytes'] / 1e6:,.0f} MB",
                    f"{drafted['flops'] / 1e9:.2f} GFLOP",
                    str(drafted["collectives"]),
                    f"{drafted['ms']:.2f} ms, {drafted['ms'] / size['pass_ms']:.1%} of {size['pass_ms']:.1f} ms",
                    f"{size['break_even']:.2f}",
                ]
            )
    head = (
        "type",
        "nodes",
        "parameters",
        "a rank reads",
        "computes",
        "collectives",
        "drafting, of a pass",
        "pays from",
    )
    return ["<h2>Types of heads</h2>", f'<p class="note">{html.escape(TYPES_SAID)}.</p>', table(head, rows)]


def adaptive_section(adaptive: Mapping[str, Any] | None) -> list[str]:
    """What choosing in every cycle how much is verified is worth; nothing where there are no heads."""
    if adaptive is None:
        return []
    rows = []
    for row in adaptive["rows"]:
        none, always, chosen = row["none_tok_s"], row["always"], row["adaptive"]
        rows.append(
            [
                str(row["batch"]),
                f"{none:.1f}",
                *(
                    "does not draft" if each is None else f"{each['tok_s']:.1f} ({each['tok_s'] / none:.2f} times)"
                    for each in (always, chosen)
                ),
                *(("", "") if chosen is None else (f"{chosen['plain_share']:.0%}", f"{chosen['nodes']:.2f}")),
            ]
        )
    head = ("requests", "none", "the whole tree every cycle", "chosen in every cycle", "plain steps", "nodes a cycle")
    return [
        "<h2>A part of the tree, as sure as the heads are</h2>",
        f'<p class="note">{html.escape(adaptive["said"])}.</p>',
        table(head, rows),
    ]


def speed_pictures(evaluation: Mapping[str, Any], gallery: Gallery) -> list[str]:
    verdict = evaluation["verdict"]
    curves = {name: [point[:4] for point in points] for name, points in evaluation["speed"].items()}
    return [
        gallery.show(
            "speed",
            draw_speed(curves, verdict["baseline_tok_s"]),
            "Tokens/s against the tokens that a pass verifies; below the line speculation costs speed.",
        ),
        gallery.show(
            "acceptance",
            draw_acceptance(evaluation["rows"], break_even_of(evaluation)),
            "Tokens emitted a pass, on held-out text, with 95% intervals, and the length from which it pays.",
        ),
    ]


def accuracy_section(evaluation: Mapping[str, Any], gallery: Gallery) -> list[str]:
    """What is known of heads; nothing where there are none."""
    if not evaluation["accuracy"]:
        return []
    tree = evaluation["tree"]
    nodes = len(tree["paths"]) + 1
    shown = [
        gallery.show(
            "heads",
            draw_heads(evaluation["accuracy"], accepted_by_head(evaluation["rows"], nodes)),
            "Share of held-out labels among each head's best choices, and of the passes that accept its draft.",
        ),
        gallery.show(
            "tree",
            draw_tree(tree["paths"], tree["shares"]),
            f"The tree of {nodes} nodes, which is the fastest here: each draft's rank among its head's choices, and "
            "how many of the passes accept it.",
        ),
        gallery.show(
            "overfitting",
            draw_overfitting(evaluation["trees"]),
            "Trees by size, on the text that they were chosen on and on held-out text; and the original code's rule, "
            "the product of the heads' accuracies.",
        ),
    ]
    return ["<h2>Heads</h2>", f'<div class="pictures">{"".join(shown)}</div>']


def breakdown_section(parts: Mapping[str, Any], gallery: Gallery) -> list[str]:
    titles = {
        "groups": "By topic.",
        "labels": "By label.",
        "positions": "By place in the answer, in tokens.",
        "sections": "In thoughts and in the answer behind them.",
    }
    shown = [
        gallery.show(
            "depth", draw_depths(parts["accepted_share"]), "Share of the passes that accept so many drafts, or more."
        )
    ]
    for key, title in titles.items():
        some = sorted(parts[key], key=lambda part: -part["length"]) if key in ("groups", "labels") else parts[key]
        if len(some) > MOST_BARS:  # the most and the least
            some = [*some[: MOST_BARS // 2], *some[-MOST_BARS // 2 :]]
        if len(some) > 1:
            bars = [
                (f"{part['name']}{'' if part['passes'] >= FEW_PASSES else ' (few)'}", part["length"], part["interval"])
                for part in some
            ]
            shown.append(gallery.show(key, draw_shares(bars, "acceptance length"), title))
    return [
        f"<h2>Where {html.escape(parts['predictor'])} with {parts['nodes']} nodes is accepted</h2>",
        f'<div class="pictures">{"".join(shown)}</div>',
    ]


def training_section(
    curves: Mapping[str, Sequence[tuple[int, float]]], metrics: Mapping[str, float], gallery: Gallery
) -> list[str]:
    shown = []
    losses = [curves[metric] for metric in sorted(curves) if metric.startswith("train/loss_head")]
    if losses:
        shown.append(gallery.show("loss", draw_losses(losses), "Training loss of each head."))
    if "heldout/acceptance_tree" in curves:
        caption = (
            "Acceptance length replayed at every validation, of the tree that was the fastest then; training text: as "
            "many answers as held-out text has."
        )
        shown.append(gallery.show("training", draw_acceptance_over_steps(curves), caption))
    found = ["<h2>Training</h2>", f'<div class="pictures">{"".join(shown)}</div>'] if shown else []
    return [*found, *_labels(metrics)]


def _labels(metrics: Mapping[str, float]) -> list[str]:
    """What the best checkpoint accepted on the held-out text of each label; nothing where no conversation has one."""
    tree, chain = "heldout/acceptance_tree", "heldout/acceptance_chain"
    labels = [metric.removeprefix(f"{tree}/") for metric in metrics if metric.startswith(f"{tree}/")]
    if not labels:
        return []
    rows = [[label, f"{metrics[f'{tree}/{label}']:.3f}", f"{metrics[f'{chain}/{label}']:.3f}"] for label in labels]
    rows.append(["all held-out text", f"{metrics[tree]:.3f}", f"{metrics[chain]:.3f}"])
    return ["<h2>By label, best checkpoint</h2>", table(("label", "acceptance length, tree", "chain"), rows)]


def cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["interval"]
    return [
        row["predictor"],
        str(row["num_nodes"]),
        f"{row['every']['length']:.3f}",
        f"{low:.3f} to {high:.3f}",
        "" if row["without_loops"]["length"] is None else f"{row['without_loops']['length']:.3f}",
        f"{row['calibration']['length']:.3f}",
    ]


def notes_section(verdict: Mapping[str, Any]) -> list[str]:
    found = ["<h2>What this rests on</h2>", "<ul>"]
    found += [f"<li>{html.escape(assumption)}</li>" for assumption in verdict["assumptions"]]
    found.append("</ul>")
    published = [row["candidate"] for row in verdict["rows"] if row["candidate"]["published"]]
    if published:
        found.append("<h2>Drafters that others published</h2>")
    for candidate in published:
        said = "; ".join([candidate["source"], *candidate["others"]])
        found.append(
            f"<p>{html.escape(candidate['predictor'])}, licence {html.escape(candidate['licence'])}: "
            f"{html.escape(said)}</p><pre>{html.escape(candidate['launch'])}</pre>"
        )
    return found
