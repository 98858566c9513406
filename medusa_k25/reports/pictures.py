"""The pictures of a run: what `evaluate` and training draw into pages and into Weights & Biases.

`rows` are those of an evaluation as JSON. Letters: K heads, R ranks.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_k25.acceptance import BOTH, BOTH_ANSWERS, CHAIN, CORPUS, NGRAM_LOOKUP, TREE
from medusa_k25.reports.page import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    TREE: "#1f5fa8",
    CHAIN: "#5b93cc",
    BOTH: "#12365f",
    BOTH_ANSWERS: "#0b7a75",
    NGRAM_LOOKUP: "#c9772b",
    "suffix lookup": "#e3b184",
    "SGLang's NGRAM": "#b08a2b",
    "training answers": "#8fbf9f",
    CORPUS: "#3f8f5f",
}
OTHER_COLOURS = ("#8a5fa8", "#5f8a8a", "#a85f7a")
LABELLED = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # sizes that have room for their number on an axis
TEXT_COLOURS = {"heldout": "#1f5fa8", "calibration": "#9a9a9a", "train": "#3f8f5f"}
HEAD_COLOURS = ("#12365f", "#1f5fa8", "#5b93cc", "#a5c4e4", "#c9d9ea", "#dde6ef", "#e8eef4", "#f0f4f8")


def colour_of(predictor: str, all_of_them: Sequence[str]) -> str:
    others = [name for name in all_of_them if name not in COLOURS]
    return COLOURS.get(predictor) or OTHER_COLOURS[others.index(predictor) % len(OTHER_COLOURS)]


def accepted_by_head(rows: Sequence[Mapping[str, Any]], num_nodes: int) -> list[float]:
    """Share of the verify passes that accept drafts of heads 1 to k, for every k; from an evaluation's rows as JSON."""
    row = next((row for row in rows if (row["predictor"], row["num_nodes"]) == (TREE, num_nodes)), None)
    if row is None:
        return []
    accepted = {int(drafts): count for drafts, count in row["every"]["accepted"].items()}
    deepest = max(map(len, row["tree"]), default=0)
    return [
        sum(count for drafts, count in accepted.items() if drafts >= k) / row["every"]["passes"]
        for k in range(1, deepest + 1)
    ]


def break_even_of(evaluation: Mapping[str, Any]) -> dict[int, float]:
    """nodes -> the acceptance length from which on such a pass pays, heads' drafting included where there are any.

    evaluation: the "evaluate" section of a report.
    """
    baseline, speeds = evaluation["verdict"]["baseline_tok_s"], evaluation["speed"]
    predictor = TREE if TREE in speeds else next(iter(speeds))
    lengths = {r["num_nodes"]: r["every"]["length"] for r in evaluation["rows"] if r["predictor"] == predictor}
    return {nodes: lengths[nodes] * baseline / speed for nodes, speed, *_ in speeds[predictor]}


def draw_acceptance(rows: Sequence[Mapping[str, Any]], break_even: Mapping[int, float]) -> "Figure":
    """Acceptance length of every predictor against the size of its passes, and from which length on those pay."""
    figure, axes = new_axes(5.4, 3.9)
    predictors = list(dict.fromkeys(row["predictor"] for row in rows))
    highest = 1.0
    for predictor in predictors:
        some = [row for row in rows if row["predictor"] == predictor]
        nodes = [row["num_nodes"] for row in some]
        colour = colour_of(predictor, predictors)
        axes.plot(nodes, [row["every"]["length"] for row in some], "o-", color=colour, label=predictor, markersize=3)
        low, high = zip(*(row["interval"] for row in some), strict=True)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.1, linewidth=0)
        highest = max(highest, *high)
    axes.plot(*zip(*break_even.items(), strict=True), "--", color="#b03a3a", linewidth=1.2, label="pays from")
    axes.set_ylim(0.95, 1.1 * highest)
    nodes_axis(axes, [row["num_nodes"] for row in rows])
    axes.set_ylabel("acceptance length")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def nodes_axis(axes: "Axes", nodes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    sizes = [size for size in sorted({*nodes}) if size in LABELLED or len({*nodes}) < 8]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("nodes verified in a pass (root included)")


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


def draw_losses(losses: Sequence[Sequence[tuple[int, float]]]) -> "Figure":
    figure, axes = new_axes()
    for k, loss in enumerate(losses):
        axes.plot(*zip(*loss, strict=True), color=HEAD_COLOURS[k], label=f"head {k + 1}", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, training")
    axes.legend(frameon=False)
    return figure


def draw_acceptance_over_steps(curves: Mapping[str, Sequence[tuple[int, float]]]) -> "Figure":
    figure, axes = new_axes()
    for text, colour in TEXT_COLOURS.items():
        for shape, style in (("tree", "-"), ("chain", ":")):
            curve = curves.get(f"{text}/acceptance_{shape}")
            if curve:
                axes.plot(
                    *zip(*curve, strict=True), style, color=colour, label=f"{text}, {shape}", marker="o", markersize=3
                )
    if "break_even" in curves:
        pays = curves["break_even"]
        axes.plot(*zip(*pays, strict=True), "--", color="#b03a3a", linewidth=1.2, label="pays from")
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def draw_depths(accepted_share: Sequence[float]) -> "Figure":
    """accepted_share[d - 1]: of the passes, those that accept d drafts or more."""
    figure, axes = new_axes()
    depths = range(1, len(accepted_share) + 1)
    bars = axes.bar(depths, accepted_share, color="#a5c4e4", width=0.7)
    axes.bar_label(bars, [f"{share:.0%}" for share in accepted_share], fontsize=9)
    axes.set_xticks(depths)
    axes.set_xlabel("drafts accepted, or more")
    axes.set_ylabel("share of the passes")
    return figure


def draw_overfitting(trees: Sequence[Mapping[str, Any]]) -> "Figure":
    """Acceptance length of trees by size and rule; `trees` of an evaluation as JSON."""
    figure, axes = new_axes()
    for chosen, colour, name in (("joint", "#1f5fa8", "by frequency"), ("product", "#c9772b", "by product")):
        some = [tree for tree in trees if tree["chosen"] == chosen]
        nodes = [tree["num_nodes"] for tree in some]
        for text, style in (("heldout", "-"), ("calibration", ":")):
            label = f"{name}, {'held-out' if text == 'heldout' else text}"
            axes.plot(nodes, [tree[text] for tree in some], style, color=colour, label=label, linewidth=1.2)
    nodes_axis(axes, [2, 4, 8, 16, 32, 64])
    axes.set_ylabel("acceptance length")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_tree(paths: Sequence[Sequence[int]], share: Sequence[float]) -> "Figure":
    """A tree from the root down; `share[i]`: of the verify passes, those that accepted the draft at `paths[i]`.

    A node shows its rank among its head's choices, its shade and the line above it how often it is accepted.
    """
    shares = {(): 1.0} | {tuple(path): value for path, value in zip(paths, share, strict=True)}
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {path: [] for path in shares}
    for path in sorted(shares, key=lambda path: (len(path), path)):
        if path:
            children[path[:-1]].append(path)
    across: dict[tuple[int, ...], float] = {}
    leaves = 0

    def place(path: tuple[int, ...]) -> float:
        nonlocal leaves
        if children[path]:
            below = [place(child) for child in children[path]]
            across[path] = (below[0] + below[-1]) / 2
        else:
            across[path] = leaves
            leaves += 1
        return across[path]

    place(())
    depth = max(map(len, shares))
    figure, axes = new_axes(max(5.4, 0.62 * leaves), 1.2 + 0.85 * depth)
    for path, x in across.items():
        y = -len(path)
        if path:
            axes.plot([across[path[:-1]], x], [y + 1, y], color="#9db8d6", linewidth=0.8 + 6 * shares[path], zorder=1)
        axes.scatter(
            [x], [y], s=260, c=[[shares[path]]], cmap="Blues", vmin=-0.1, vmax=1, edgecolors="#12365f", zorder=2
        )
        dark = shares[path] > 0.55
        label = "root" if not path else f"{path[-1] + 1}"
        axes.text(x, y, label, ha="center", va="center", fontsize=7, color="white" if dark else "#12365f", zorder=3)
        if path:
            axes.text(x + 0.27, y, f"{shares[path]:.0%}", va="center", fontsize=7, color="#555")
    axes.set_ylim(-depth - 0.45, 0.45)
    axes.set_xlim(-0.7, leaves - 0.1)
    axes.set_yticks([-d for d in range(1, depth + 1)], [f"head {d}" for d in range(1, depth + 1)])
    axes.set_xticks([])
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def draw_shares(bars: Sequence[tuple[str, float, tuple[float, float] | None]], unit: str) -> "Figure":
    """Horizontal bars: (what, value, its interval) from top to bottom."""
    figure, axes = new_axes(5.4, 0.8 + 0.28 * len(bars))
    places = range(len(bars))
    values = [value for _, value, _ in bars]
    axes.barh(places, values, color="#a5c4e4", height=0.7)
    for place, (_, value, interval) in zip(places, bars, strict=True):
        if interval is not None:
            axes.plot(interval, [place, place], color="#12365f", linewidth=1.5)
        axes.text(max(value, interval[1] if interval else 0), place, f" {value:.2f}", va="center", fontsize=8)
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    return figure


def draw_speed(curves: Mapping[str, Sequence[tuple[int, float, float, float]]], baseline: float) -> "Figure":
    """Tokens/s against nodes: `curves[predictor]` holds (nodes, tokens/s, low, high); below the line it costs speed."""
    figure, axes = new_axes(5.4, 3.9)
    for predictor, points in curves.items():
        nodes, speed, low, high = zip(*points, strict=True)
        colour = colour_of(predictor, list(curves))
        axes.plot(nodes, speed, "o-", color=colour, label=predictor, markersize=3, linewidth=1.2)
        axes.fill_between(nodes, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(baseline, linestyle="--", color="#b03a3a", linewidth=1.2, label="without speculation")
    nodes_axis(axes, [nodes for points in curves.values() for nodes, *_ in points])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s of one request")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
