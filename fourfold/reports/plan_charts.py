"""Step time against memory, of trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fourfold.reports.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, draw_grid, figure, spread


@dataclass(frozen=True)
class Dot:
    """A layout in the scatter; ``text`` is its tooltip, and ``out`` grays it."""

    x: float
    y: float
    text: str
    out: bool = False
    best: bool = False


def scatter(title: str, dots: Sequence[Dot], limit: float, *, x_label: str, limit_label: str) -> str:
    """Draw dots on a linear x and a logarithmic y axis, with a vertical line at ``limit``."""
    width, height = 1072, 380
    x_axis = Axis(*spread([d.x for d in dots] + [limit, 0.0], margin=0.03), LEFT, width - RIGHT)
    y_axis = Axis(*spread([d.y for d in dots], margin=0.05, log=True), height - BOTTOM, TOP, True)
    # Grayed dots first and the best last, so that it is drawn on top.
    circles = "".join(
        f'<circle class="dot {"out" if d.out else "s1" if d.best else "s0"}" cx="{x_axis(d.x):g}" cy="{y_axis(d.y):g}" '
        f'r="{5 if d.best else 3}"><title>{escape(d.text)}</title></circle>'
        for d in sorted(dots, key=lambda d: (not d.out, d.best))
    )
    line = (
        f'<line class="limit" x1="{x_axis(limit)}" x2="{x_axis(limit)}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text x="{x_axis(limit) - 6}" y="{TOP + 12}" text-anchor="end">{escape(limit_label)}</text>'
    )
    style = "<style>.out{color:var(--faint);fill-opacity:.35}.limit{stroke:var(--s7);stroke-dasharray:5 4}</style>"
    body = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{style}'
        f"{draw_grid(x_axis, y_axis, width, height, x_label)}{line}{circles}</svg>"
    )
    return figure(title, [], body)
