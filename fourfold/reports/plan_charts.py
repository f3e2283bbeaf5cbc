"""Charts of a plan: step time against memory, and a pipeline's timetable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from fourfold.reports.svg import BOTTOM, LEFT, RIGHT, TOP, Axis, draw_grid, figure, spread

if TYPE_CHECKING:
    from fourfold.parallel.schedule import Span


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


KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
"""Kinds of operations, in the order of their colors."""


def timetable(ranks: Sequence[Sequence[Span]], unit: float, title: str) -> str:
    """Draw a row per rank of pp: forwards, backwards (or their halves), and gaps, which are the bubble.

    ``unit`` is the seconds of a forward.
    """
    stages = len(ranks)
    kinds = [kind for kind in KINDS if any(span.op.kind == kind for spans in ranks for span in spans)]
    end = max(spans[-1].end for spans in ranks) * unit
    width, row = 1072, 22
    axis = Axis(0.0, end, 70, width - RIGHT)

    def box(rank: int, span: Span) -> str:
        kind, begin, over = span.op.kind, span.begin * unit, span.end * unit
        shade = 1 - 0.5 * (span.op.stage // stages % 2)
        return (
            f'<rect class="part s{kinds.index(kind)}" x="{axis(begin)}" y="{8 + row * rank}" '
            f'width="{max(axis(over) - axis(begin), 0.3):.1f}" height="{row - 5}" fill-opacity="{shade:g}">'
            f"<title>{KINDS[kind]} of micro-batch {span.op.micro_batch}, stage {span.op.stage}: "
            f"{begin:.3g} to {over:.3g} s</title></rect>"
        )

    boxes = "".join(box(rank, span) for rank, spans in enumerate(ranks) for span in spans)
    labels = "".join(
        f'<text x="62" y="{8 + row * stage + 13}" text-anchor="end">rank {stage}</text>' for stage in range(stages)
    )
    ticks = axis.ticks(8)
    foot = 8 + row * stages
    numbers = "".join(f'<text x="{axis(t)}" y="{foot + 14}" text-anchor="middle">{t:g}</text>' for t in ticks)
    body = (
        f'<svg viewBox="0 0 {width} {foot + 22}" role="img" aria-label="{escape(title)}">{labels}{numbers}{boxes}</svg>'
    )
    return figure(title, [KINDS[kind] for kind in kinds], body)
