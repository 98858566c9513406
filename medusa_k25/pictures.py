"""The pictures of a run: what `evaluate` and training draw into pages and into Weights & Biases.

`rows` are those of an evaluation as JSON. Letters: K heads, R ranks.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_k25.page import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"heads, tree": "#1f5fa8", "untrained heads, tree": "#9a9a9a", "n-gram lookup": "#c9772b"}
TEXT_COLOURS = {"heldout": "#1f5fa8", "calibration": "#9a9a9a", "train": "#3f8f5f"}
HEAD_COLOURS = ("#12365f", "#1f5fa8", "#5b93cc", "#a5c4e4", "#c9d9ea", "#dde6ef", "#e8eef4", "#f0f4f8")


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


def draw_losses(losses: Sequence[Sequence[tuple[int, float]]]) -> "Figure":
    figure, axes = new_axes()
    for k, loss in enumerate(losses):
        axes.plot(*zip(*loss, strict=True), color=HEAD_COLOURS[k], label=f"head {k + 1}", linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, training")
    axes.legend(frameon=False)
    return figure


def draw_acceptance_over_steps(curves: Mapping[str, Sequence[tuple[int, float]]], break_even: float | None) -> "Figure":
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
