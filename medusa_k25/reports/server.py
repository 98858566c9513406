"""server.html: heads on a running server beside the same server without them. And the same as text."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_k25.reports.evaluation import Gallery
from medusa_k25.reports.page import html_page, new_axes, table, tile
from medusa_k25.reports.report import read_report
from medusa_k25.serving.live import WITH, WITHOUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {WITH: "#1f5fa8", WITHOUT: "#b03a3a"}
MOST_BARS = 16


def sentence(section: Mapping[str, Any]) -> str:
    """The outcome in words."""
    levels = section["levels"]
    if levels[0]["ratio"] is None:
        return (
            "Nothing was compared: with baseline=URL, a server without heads, or control=FOLDER, this server's own "
            "switch, the same prompts are asked without heads, too."
        )
    speeds = ", ".join(f"{each['ratio'][0]:.2f} times at {each['concurrency']} ({each['outcome']})" for each in levels)
    return f"With heads the tokens/s of all requests together are, by requests at a time: {speeds}. {outputs(section)}"


def outputs(section: Mapping[str, Any]) -> str:
    equality = section["equality"]
    if equality is None:
        return "Answers are sampled: that they are equal is not claimed."
    words = f"{equality['equal']:,} of {equality['answers']:,} answers are equal, token for token."
    if equality["of_itself"] and equality["equal"] < equality["answers"]:
        words += (
            f" Of the answers without heads {equality['of_itself_equal']:,} of {equality['of_itself']:,} equal those "
            "to the same prompts at the lowest concurrency: so much is rounding."
        )
    return words


def speed_cells(level: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, speed in level["speeds"].items():
        against = ""
        if name == WITH and level["ratio"] is not None:
            middle, low, high = level["ratio"]
            against = f"{middle:.2f} ({low:.2f} to {high:.2f}) {level['outcome']}"
        token = "-" if speed["token_ms"] is None else f"{speed['token_ms']:.1f}"
        rows.append(
            [
                str(level["concurrency"]),
                name,
                f"{speed['tok_s']:.1f} ({speed['low_tok_s']:.1f} to {speed['high_tok_s']:.1f})",
                f"{speed['first_ms']:.0f}",
                token,
                f"{speed['answers']:,}",
                against,
            ]
        )
    return rows


SPEED_HEAD = (
    "requests at a time",
    "side",
    "tokens/s, all together",
    "ms to the first token",
    "ms a token",
    "answers",
    "against without",
)


def acceptance_head(section: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        section["label"],
        "prompts",
        "passes",
        "acceptance length",
        "replay, held-out text",
        "replay, these prompts",
    )


def acceptance_cells(section: Mapping[str, Any]) -> list[list[str]]:
    replayed, here = (by_name(section[key]) for key in ("replayed", "replayed_here"))
    rows = []
    for part in section["acceptance"]:
        every, same = replayed.get(part["name"]), here.get(part["name"])
        rows.append(
            [
                part["name"],
                f"{part['documents']:,}",
                f"{part['passes']:,}",
                _length(part),
                f"{_length(every)}, {every['documents']:,} answers" if every else "not known",
                f"{same['length']:.3f}, {same['documents']:,} answers" if same else "not known",
            ]
        )
    return rows


def by_name(parts: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {part["name"]: part for part in parts}


def _length(part: Mapping[str, Any]) -> str:
    low, high = part["interval"]
    return f"{part['length']:.3f} ({low:.3f} to {high:.3f})"


def other_facts(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, words): outputs, KV room, tool calls."""
    found = []
    if section["levels"][0]["ratio"] is not None:
        found.append(("greedy outputs", outputs(section)))
    if (cycles := section["cycles"])["known"]:
        words = f"{cycles['nodes'] / cycles['known']:.1f} of {section['nodes']} on average; plain steps "
        words += f"{cycles['plain'] / cycles['known']:.1%}"
        if cycles["nodes"] < section["nodes"] * cycles["known"]:
            words += " (a server that chooses its passes accepts less a pass than replay of the whole tree)"
        found.append(("nodes of a pass", words))
    room = section["kv_tokens"]
    if room is None:
        found.append(("room for keys and values", "what heads take of it is known with baseline=URL alone"))
    else:
        lost = f"{1 - room[WITH] / room[WITHOUT]:.1%} lost"
        words = f"{room[WITH]:,} tokens with heads, {room[WITHOUT]:,} without: {lost}"
        found.append(("room for keys and values", words))
    tools = section["tools"]
    if isinstance(tools, str):
        found.append(("tool calls that parse", tools))
    else:
        for name, each in tools.items():
            share = f" ({each['parsed'] / each['calls']:.1%})" if each["calls"] else ""
            found.append(
                (
                    f"tool calls that parse, {name}",
                    f"{each['parsed']:,} of {each['calls']:,}{share}, in {each['calling']:,} of {each['answers']:,} "
                    "answers to prompts with tools",
                )
            )
    return found


def as_text(section: Mapping[str, Any]) -> str:
    speeds = [cells for level in section["levels"] for cells in speed_cells(level)]
    lines = [
        *aligned(SPEED_HEAD, speeds),
        "",
        *aligned(acceptance_head(section), acceptance_cells(section)),
        "",
        *(f"{what}: {words}" for what, words in other_facts(section)),
        *(f"note: {note}" for note in section["notes"]),
        "",
        sentence(section),
    ]
    return "\n".join(lines)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in (head, *rows)
    ]


def write_server_page(run_dir: Path) -> Path:
    """server.html and server_pictures/*.png in the run's folder, from its report.json."""
    section = read_report(run_dir)["server"]
    gallery = Gallery(run_dir / "server_pictures")
    pictures = [
        gallery.show(
            "speed",
            draw_speed_by_concurrency(section["levels"]),
            "Tokens/s of all requests together; medians of the rounds, and from the slowest to the fastest one.",
        )
    ]
    if section["acceptance"]:
        pictures.append(
            gallery.show(
                "acceptance",
                draw_beside_replay(section["acceptance"], by_name(section["replayed"])),
                "Tokens emitted a pass, plain steps among them: counted by the server, and by replay of cached "
                "answers, in which every pass verifies the whole tree, with 95% intervals over prompts.",
            )
        )
    what = (
        f"{section['prompts']:,} prompts, answers of at most {section['max_new_tokens']:,} tokens, temperature "
        f"{section['temperature']:g}, {section['rounds']} rounds of each concurrency, the sides taking turns; "
        f"{section['nodes']} nodes a pass"
    )
    body = "\n".join(
        [
            f"<h1>{html.escape(run_dir.name)}: heads on a running server</h1>",
            f'<p class="note">{html.escape(section["described"])}<br>{html.escape(what)}</p>',
            f'<p class="verdict">{html.escape(sentence(section))}</p>',
            f'<div class="tiles">{"".join(tiles(section))}</div>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            "<h2>Speed</h2>",
            table(SPEED_HEAD, [cells for level in section["levels"] for cells in speed_cells(level)]),
            '<p class="note">Times are medians over answers. Every request reads its whole prompt: none finds its '
            "start in the prefix cache.</p>",
            "<h2>Acceptance length</h2>",
            table(acceptance_head(section), acceptance_cells(section)),
            "<h2>What else</h2>",
            table(("", ""), [[what, html.escape(words)] for what, words in other_facts(section)]),
            *differing(section),
            *notes(section),
        ]
    )
    page = run_dir / "server.html"
    page.write_text(html_page(f"{run_dir.name} - heads on a running server", body))
    return page


def tiles(section: Mapping[str, Any]) -> list[str]:
    found = []
    if section["acceptance"]:
        low, high = section["replayed"][0]["interval"] if section["replayed"] else (None, None)
        note = "tokens a verify pass" if low is None else f"by replay {low:.2f} to {high:.2f}"
        found.append(tile("acceptance length", f"{section['acceptance'][0]['length']:.3f}", note))
    for level in section["levels"]:
        if level["ratio"] is None:
            speed = level["speeds"][WITH]
            found.append(tile(f"{level['concurrency']} at a time", f"{speed['tok_s']:.1f}", "tokens/s"))
        else:
            found.append(tile(f"{level['concurrency']} at a time", f"{level['ratio'][0]:.2f}x", level["outcome"]))
    if equality := section["equality"]:
        found.append(tile("equal answers", f"{equality['equal']:,}", f"of {equality['answers']:,}, token for token"))
    return found


def differing(section: Mapping[str, Any]) -> list[str]:
    if not section["equality"] or not section["equality"]["differing"]:
        return []
    rows = [[html.escape(id), str(level), f"{at:,}"] for id, level, at in section["equality"]["differing"]]
    return [
        "<h2>Answers that differ, the first of them</h2>",
        table(("prompt", "requests at a time", "equal tokens before"), rows),
    ]


def notes(section: Mapping[str, Any]) -> list[str]:
    if not section["notes"]:
        return []
    return ["<h2>Notes</h2>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in section["notes"]), "</ul>"]


def draw_speed_by_concurrency(levels: Sequence[Mapping[str, Any]]) -> "Figure":
    figure, axes = new_axes()
    for side, name in enumerate(levels[0]["speeds"]):
        speeds = [level["speeds"][name] for level in levels]
        width = 0.8 / len(levels[0]["speeds"])
        places = [place + width * (side + 0.5) - 0.4 for place in range(len(levels))]
        values = [speed["tok_s"] for speed in speeds]
        reach = [
            [speed["tok_s"] - speed["low_tok_s"] for speed in speeds],
            [speed["high_tok_s"] - speed["tok_s"] for speed in speeds],
        ]
        bars = axes.bar(
            places, values, width * 0.92, yerr=reach, color=COLOURS[name], ecolor="#222", capsize=3, label=name
        )
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=8)
    axes.set_xticks(range(len(levels)), [str(level["concurrency"]) for level in levels])
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("tokens/s, all together")
    axes.margins(y=0.15)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def draw_beside_replay(parts: Sequence[Mapping[str, Any]], replayed: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Two intervals a label: the server's own and replay's; the first MOST_BARS labels."""
    some = parts[:MOST_BARS]
    figure, axes = new_axes(5.4, 1.3 + 0.36 * len(some))
    for known, colour, offset, name in (
        (dict(enumerate(some)), COLOURS[WITH], -0.14, "the server's counters"),
        (
            {i: replayed[part["name"]] for i, part in enumerate(some) if part["name"] in replayed},
            "#c9772b",
            0.14,
            "replay",
        ),
    ):
        places, lengths = [place + offset for place in known], [part["length"] for part in known.values()]
        for place, part in zip(places, known.values(), strict=True):
            axes.plot(part["interval"], [place, place], color=colour, linewidth=1.5)
        if known:
            axes.plot(lengths, places, "o", color=colour, markersize=5, label=name)
    axes.set_yticks(range(len(some)), [part["name"] for part in some], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.08)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e4e4e4")
    axes.set_xlabel("acceptance length")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
