"""What a cache has to show: tables for the terminal, one self-contained page for people.

Both are made from the section that `inspect` writes into report.json.
"""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_k25.chat import bracketed
from medusa_k25.reports.page import html_page, new_axes, picture, table, tile
from medusa_k25.reports.report import read_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, GREY, ORANGE = "#1f5fa8", "#9a9a9a", "#c9772b"
MOST_BARS = 12  # of a picture whose bars have names
COLUMNS = ("documents", "tokens", "answers", "answer tokens", "states", "GB of states", "in a loop", "cut", "one token")


def contents_table(title: str, parts: Mapping[str, Mapping[str, int]]) -> str:
    """A line a part, each given by its `Contents` as JSON."""
    width = max(map(len, [title, *parts]))
    lines = [f"{title:<{width}}" + "".join(f"{column:>14}" for column in COLUMNS)]
    lines += [f"{name:<{width}}" + "".join(f"{cell:>14}" for cell in _cells(part)) for name, part in parts.items()]
    return "\n".join(lines)


def _cells(part: Mapping[str, int]) -> list[str]:
    counts = [f"{part[key]:,}" for key in ("documents", "tokens", "answers", "answer_tokens", "states")]
    loops, cut, short = (part[key] for key in ("loops", "cut", "short"))
    return [*counts, f"{part['bytes'] / 1e9:.3f}", f"{loops:,}", f"{cut:,}", f"{short:,}"]


def summary(section: Mapping[str, Any]) -> str:
    """The section as text."""
    total, twice = section["total"], section["duplicates"]
    lines = [
        "",
        contents_table("split", section["splits"] | {"total": total}),
        "",
        contents_table("label", section["labels"]),
        "",
        *(
            f"{f'{name} tokens':<20} median {sizes['median']:,}, 95% at most {sizes['p95']:,}, longest {sizes['max']:,}"
            for name, sizes in section["lengths"].items()
        ),
        f"{'repetition':<20} {share(total['loops'], total['answers'])} of the answers end in a loop",
        f"{'length limit':<20} {share(total['cut'], total['documents'])} of the documents are cut by it",
        f"{'duplicates':<20} {twice['documents']:,} of {total['documents']:,} documents share their prompt with others "
        f"({twice['prompts']:,} prompts), {twice['left_out']:,} are left out for one in another split",
        "",
        "documents by how their text was made",
    ]
    for aspect, counts in section["origins"].items():
        values = ", ".join(f"{value}: {count:,}" for value, count in counts.items())
        lines.append(f"{aspect:<20} {values}")
    lines += ["", *alignment_lines(section["self_check"]), *fp8_lines(section["fp8"])]
    for sample in section["samples"]:
        lines += ["", f"document {sample['id']!r} ({sample['split']}), [[answers in brackets]]:"]
        lines.append(bracketed(sample["pieces"]))
    return "\n".join(lines)


def share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"


def alignment_lines(check: Mapping[str, float]) -> list[str]:
    expected = check["expected_agreement"]
    by_temperature = (
        "no document says at which temperature it was sampled, so there is no figure to compare with"
        if expected is None
        else f"by the temperature of the text it should be the next {expected:.1%} of the time"
    )
    return [
        f"{'self-check':<20} at {check['positions']:,} positions the states predict the next token "
        f"{check['agreement']:.1%} of the time, the current one {check['agreement_with_current']:.1%}, the one after "
        f"the next {check['agreement_with_second']:.1%}, the next with one norm less "
        f"{check['agreement_other_norm']:.1%}",
        f"{'':<20} {by_temperature}",
        f"{'':<20} RMS(h / norm weight) is {check['rms_low']:.4f} to {check['rms_high']:.4f}; 1 after the final norm",
    ]


def fp8_lines(fp8: Mapping[str, Any]) -> list[str]:
    *size, note = fp8_sentences(fp8)
    lines = [f"{'as fp8':<20} {sentence}" for sentence in size]
    for k, head in enumerate(fp8.get("heads", ()), start=1):
        change = f"{head['points']:+.2f} points, standard error {head['points_error']:.2f}"
        lines.append(
            f"{f'  head {k}':<20} top-1 {head['top1']:.2%} -> {head['top1_fp8']:.2%} ({change}: "
            f"{head['gained']} gained, {head['lost']} lost of {head['labels']:,} held-out labels)"
        )
    return lines + [f"{'' if lines else 'as fp8':<20} {note}"]


def fp8_sentences(fp8: Mapping[str, Any]) -> list[str]:
    if "same_argmax" not in fp8:
        return [fp8["note"]]
    return [
        f"the states would take {fp8['size']:.1%} of their bytes; at {fp8['positions']:,} positions "
        f"{fp8['same_argmax']:.2%} keep their most likely token",
        fp8["note"],
    ]


def write_cache_page(run_dir: Path) -> Path:
    """inspect.html from the run's report.json: one file, no network, pictures inside."""
    section = read_report(run_dir)["inspect"]
    total, check, fp8 = section["total"], section["self_check"], section["fp8"]
    checked = "every byte is as it was written" if section["verify"] == "full" else "a sample was checked"
    tiles = [
        tile("documents", f"{total['documents']:,}", f"{section['duplicates']['prompts']:,} different prompts"),
        tile("tokens", compact(total["tokens"]), f"{compact(total['answer_tokens'])} of them in answers"),
        tile("states", compact(total["states"]), f"{total['bytes'] / 1e9:,.2f} GB, {section['storage_dtype']}"),
        tile(
            "next token predicted", f"{check['agreement']:.1%}", f"at {check['positions']:,} positions, by the states"
        ),
        tile("end in a loop", share(total["loops"], total["answers"]), f"{total['loops']:,} answers"),
        tile("cut by the limit", share(total["cut"], total["documents"]), f"{total['cut']:,} documents"),
    ]
    pictures = [
        picture(draw_histogram(bars, name), f"{name.capitalize()} lengths. {_quantiles(section['lengths'][name])}")
        for name, bars in section["histograms"].items()
    ]
    pictures.append(
        picture(
            draw_alignment(check),
            "How often the most likely token after a state is the next, the current, or the token after the next; and "
            "the next, with one final norm less.",
        )
    )
    named = {
        "split": _documents(section["splits"]),
        "label": _documents(section["labels"]),
        "sampling": section["origins"].get("sampling", {}),
        "mode": section["origins"].get("mode", {}),
    }
    pictures += [picture(draw_counts(some), f"Documents by {what}.") for what, some in named.items() if len(some) > 1]
    if fp8.get("heads"):
        pictures.append(picture(draw_fp8(fp8["heads"]), "Top-1 accuracy of each head on held-out text; paired labels."))
    target = section["target"]
    body = "\n".join(
        [
            f"<h1>{html.escape(section['cache'])}</h1>",
            f'<p class="note">{html.escape(target["name"])} ({html.escape(target["revision"])}), states by '
            f"{html.escape(section['engine'])}, {html.escape(section['created'])}; fingerprint "
            f"{section['fingerprint'][:16]}; {section['shards']:,} shards, {checked}</p>",
            f'<div class="tiles">{"".join(tiles)}</div>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            "<h2>By split</h2>",
            table(("split", *COLUMNS), [[name, *_cells(part)] for name, part in _with_total(section).items()]),
            "<h2>By label</h2>",
            table(("label", *COLUMNS), [[name, *_cells(part)] for name, part in section["labels"].items()]),
            "<h2>How the text was made</h2>",
            table(("", "documents", "share"), _origin_rows(section["origins"], total["documents"])),
            "<h2>What storing as fp8 would cost</h2>",
            *(f"<p>{html.escape(sentence)}</p>" for sentence in fp8_sentences(fp8)),
            *_fp8_table(fp8.get("heads", [])),
            "<h2>Samples</h2>",
            '<p class="note">What the loss mask keeps is marked: heads learn to predict these tokens.</p>',
            *(_sample(sample) for sample in section["samples"]),
            *_unlisted(section["unlisted"]),
        ]
    )
    page = run_dir / "inspect.html"
    page.write_text(html_page(f"{section['cache']} - contents", body))
    return page


def compact(count: int) -> str:
    """12,345,678 -> 12.3 M"""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,}"


def _quantiles(sizes: Mapping[str, int]) -> str:
    return f"Median {sizes['median']:,}, 95% at most {sizes['p95']:,}, longest {sizes['max']:,} tokens."


def _documents(parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: part["documents"] for name, part in parts.items()}


def _with_total(section: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    return section["splits"] | {"total": section["total"]}


def _origin_rows(origins: Mapping[str, Mapping[str, int]], documents: int) -> list[list[str]]:
    return [
        [f"{aspect}: {value}", f"{count:,}", share(count, documents)]
        for aspect, counts in origins.items()
        for value, count in counts.items()
    ]


def _fp8_table(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    if not heads:
        return []
    rows = [
        [
            f"head {k}",
            f"{head['labels']:,}",
            f"{head['top1']:.2%}",
            f"{head['top1_fp8']:.2%}",
            f"{head['points']:+.2f} ± {head['points_error']:.2f}",
            f"{head['gained']:,}",
            f"{head['lost']:,}",
        ]
        for k, head in enumerate(heads, start=1)
    ]
    return [
        table(
            ("", "held-out labels", "top-1 as stored", "top-1 as fp8", "points, standard error", "gained", "lost"), rows
        )
    ]


def _sample(sample: Mapping[str, Any]) -> str:
    text = "".join(
        f"<mark>{html.escape(text)}</mark>" if kept else html.escape(text) for kept, text in sample["pieces"]
    )
    return f'<p class="note">{html.escape(sample["id"])} ({html.escape(sample["split"])})</p><pre>{text}</pre>'


def _unlisted(files: Mapping[str, int]) -> list[str]:
    if not files:
        return []
    rows = [[name, f"{size / 1e6:,.1f}"] for name, size in files.items()]
    return ["<h2>Files that no index names</h2>", table(("left by a killed or a running writer", "MB"), rows)]


def draw_histogram(histogram: Mapping[str, Any], name: str) -> "Figure":
    figure, axes = new_axes()
    width, counts = histogram["width"], histogram["counts"]
    axes.bar([i * width for i in range(len(counts))], counts, width=0.92 * width, align="edge", color=BLUE)
    axes.set_xlim(0, max(len(counts), 1) * width)
    axes.set_xlabel(f"{name} tokens")
    axes.set_ylabel("answers" if name == "answer" else "documents")
    return figure


def draw_alignment(check: Mapping[str, float]) -> "Figure":
    names = ("next token", "current token", "token after the next", "next, one norm less")
    shares = [
        check[key] for key in ("agreement", "agreement_with_current", "agreement_with_second", "agreement_other_norm")
    ]
    figure, axes = new_axes()
    bars = axes.barh(names, shares, color=[BLUE, GREY, GREY, ORANGE])
    axes.bar_label(bars, [f" {value:.1%}" for value in shares])
    _only_names(axes, 1.12)
    return figure


def draw_counts(counts: Mapping[str, int]) -> "Figure":
    """A bar a name; the smallest together where there are too many."""
    bars = dict(sorted(counts.items(), key=lambda item: -item[1])[:MOST_BARS]) if len(counts) > MOST_BARS else counts
    if rest := sum(counts.values()) - sum(bars.values()):
        bars = {**bars, f"({len(counts) - len(bars)} others)": rest}
    figure, axes = new_axes()
    names = [name if len(name) <= 44 else name[:43] + "…" for name in bars]
    drawn = axes.barh(range(len(bars)), list(bars.values()), color=BLUE, height=0.7)
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(-0.6, max(len(bars), 4) - 0.4)  # few bars stay slim
    axes.bar_label(drawn, [f" {count:,}" for count in bars.values()])
    _only_names(axes, 1.2 * max([1, *bars.values()]))
    return figure


def _only_names(axes: Any, limit: float) -> None:
    axes.set_xlim(0, limit)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def draw_fp8(heads: Sequence[Mapping[str, Any]]) -> "Figure":
    figure, axes = new_axes()
    for shift, key, colour, label in ((-0.2, "top1", BLUE, "as stored"), (0.2, "top1_fp8", ORANGE, "as fp8")):
        places = [k + shift for k in range(1, len(heads) + 1)]
        bars = axes.bar(places, [head[key] for head in heads], width=0.36, color=colour, label=label)
        axes.bar_label(bars, [f"{head[key]:.3f}" for head in heads], fontsize=8)
    axes.set_xticks(range(1, len(heads) + 1))
    axes.set_xlabel("head")
    axes.set_ylabel("top-1 accuracy")
    axes.legend(edgecolor="none")
    return figure
