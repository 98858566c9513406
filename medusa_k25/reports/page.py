"""Parts of a self-contained HTML page: no network, pictures inside."""

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def html_page(title: str, body: str) -> str:
    head, tail = PAGE.split("BODY")
    return head.replace("TITLE", html.escape(title)) + body + tail


def tile(what: str, value: str, note: str) -> str:
    return f'<div class="tile"><span>{html.escape(what)}</span><b>{value}</b><span>{html.escape(note)}</span></div>'


def picture(figure: "Figure", caption: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?<svg", "<svg", buffer.getvalue(), count=1, flags=re.DOTALL)
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = [
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows
    ]
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def new_axes(width: float = 5.4, height: float = 3.4) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    return figure, axes


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fafafa; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 1.2rem 0 .5rem }
.verdict { font-size: 1.15rem; margin: .6rem 0 1rem }
li { margin: .15rem 0 }
.note { color: #666; margin: .2rem 0 1.2rem; overflow-wrap: anywhere }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem }
.tile { background: white; border: 1px solid #e4e4e4; border-radius: 8px; padding: .7rem 1rem; flex: 1 1 8rem;
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
pre { background: white; border: 1px solid #e4e4e4; border-radius: 8px; margin: .5rem 0; padding: .7rem 1rem;
      font: 13px/1.5 ui-monospace, monospace; color: #666; white-space: pre-wrap; overflow-wrap: anywhere }
pre mark { background: #d5e6f8; color: #12365f }
</style></head><body>
BODY
</body></html>
"""
