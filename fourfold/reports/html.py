"""Build the HTML of report pages. A page is one file that contains everything it needs and fetches nothing."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from fourfold.reports.chart import asset
from fourfold.training.console import format_fact

# With this policy, the browser loads nothing from the network, even if a run file or a sample contains HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

LONG_TEXT = 40
"""A value with more characters than this gets a wide card (see ``facts``)."""


def page(
    title: str, subtitle: str, sections: Sequence[str], *, has_search: bool = False, reload_seconds: int | None = None
) -> str:
    """Return a complete HTML document, with the scripts that draw charts.

    Args:
        title: The title, as plain text.
        subtitle: A text below the title, as plain text.
        sections: The HTML of each section.
        has_search: Whether a section contains a ``search_table``.
        reload_seconds: Number of seconds between two reloads of the page in the browser. The reloads end when the file
            has not changed for an hour, or for ten times ``reload_seconds`` if this is longer. None: no reloads.
    """
    body = "\n".join(sections)
    needed = {"echarts.min.js": True, "charts.js": True, "table.js": has_search}
    drawing = "\n".join(f"<script>{asset(name)}</script>" for name, is_needed in needed.items() if is_needed)
    if reload_seconds is not None:
        script = Template(asset("reload.js")).substitute(seconds=reload_seconds, written=round(time.time()))
        drawing += f"\n<script>{script}</script>"
    texts = {"policy": _POLICY, "title": escape(title), "subtitle": escape(subtitle), "style": asset("page.css")}
    return Template(asset("page.html")).substitute(texts, body=body, drawing=drawing)


def facts(values: Mapping[str, str | int | float | None]) -> str:
    """Return HTML with a card for each label and its value. Long values get wide cards."""
    cards = []
    for label, value in values.items():
        text = format_fact(value)
        size = ' class="long"' if len(text) > LONG_TEXT else ""
        cards.append(f"<div{size}><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>")
    return f'<dl class="facts">{"".join(cards)}</dl>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> str:
    """Return an HTML table of plain texts. If the page is narrow, the reader can scroll the table sideways, with the
    mouse or the keyboard.

    With ``words``, all columns are left-aligned. Otherwise, all columns except the first are right-aligned.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = "words" if words else "rows"
    label = escape(f"Table: {', '.join(cell for cell in header if cell)}")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def search_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table that the reader can sort and filter by any column."""
    whole = table(header, rows).replace('class="scroll"', 'class="scroll tall"', 1)
    return '<p class="subtitle"></p>' + whole.replace('class="rows"', 'class="rows search"', 1)


def charts(figures: Sequence[str], wide: Sequence[str] = ()) -> str:
    """Return HTML that shows figures in two columns. The figures in ``wide`` come first, and each of them spans both
    columns."""
    full = "".join(f'<div class="wide">{figure}</div>' for figure in wide)
    return f'<div class="charts">{full}{"".join(figures)}</div>'


def text_block(heading: str, text: str) -> str:
    """Return HTML that shows a text verbatim under a heading. Long lines are wrapped, as for prose."""
    return f'<h2>{escape(heading)}</h2>\n<pre class="wrap">{escape(text)}</pre>'


def code(text: str) -> str:
    """Return HTML that shows a text verbatim. The reader can scroll long lines sideways, with the mouse or keyboard."""
    return f'<pre tabindex="0">{escape(text)}</pre>'


def folded(heading: str, text: str) -> str:
    """Return HTML that shows only a heading. A click on the heading shows a text below it, verbatim."""
    return f"<details><summary><h2>{escape(heading)}</h2></summary>\n{code(text)}</details>"


def comparison(before: str, sides: Mapping[str, Sequence[tuple[str, bool]]]) -> str:
    """Return HTML with the start of a text, and below it two or more continuations of the text.

    Args:
        before: The start of the text.
        sides: For each continuation, its label and its pieces. A piece is a text and a flag. The flag is True if all
            continuations have this text, and the piece is then highlighted.
    """
    blocks = [f"<p>{escape(before)}</p>"]
    for label, pieces in sides.items():
        text = "".join(f"<mark>{escape(piece)}</mark>" if shared else escape(piece) for piece, shared in pieces)
        blocks.append(f'<p><b>{escape(label)}</b> <span class="text">{text}</span></p>')
    return f'<div class="comparison">{"".join(blocks)}</div>'


def notice(text: str) -> str:
    """Return HTML that shows a text as a highlighted note."""
    return f'<p class="notice">{escape(text)}</p>'
