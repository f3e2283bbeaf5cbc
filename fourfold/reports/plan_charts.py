"""Charts of a plan: memory against step time, and a pipeline's timetable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fourfold.planning.pipeline_schedule import Slot
from fourfold.reports.svg import _BOTTOM, _LEFT, _RIGHT, _TOP, _Axis, _figure, _grid, _spread


@dataclass(frozen=True)
class Dot:
    """A layout in the scatter: what stands under the pointer; ``out`` greys it."""

    x: float
    y: float
    text: str
    out: bool = False
    best: bool = False


def scatter(title: str, dots: Sequence[Dot], limit: float, *, x_label: str, limit_label: str) -> str:
    """Dots on a linear x and a logarithmic y axis, with a vertical line at ``limit``."""
    width, height = 1072, 380
    x_axis = _Axis(*_spread([d.x for d in dots] + [limit, 0.0], margin=0.03), _LEFT, width - _RIGHT)
    y_axis = _Axis(*_spread([d.y for d in dots], margin=0.05, log=True), height - _BOTTOM, _TOP, True)
    # Greyed dots first, the best last, so that it lies on top.
    circles = "".join(
        f'<circle class="dot {"out" if d.out else "s1" if d.best else "s0"}" cx="{x_axis(d.x):g}" cy="{y_axis(d.y):g}" '
        f'r="{5 if d.best else 3}"><title>{escape(d.text)}</title></circle>'
        for d in sorted(dots, key=lambda d: (not d.out, d.best))
    )
    line = (
        f'<line class="limit" x1="{x_axis(limit)}" x2="{x_axis(limit)}" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
        f'<text x="{x_axis(limit) - 6}" y="{_TOP + 12}" text-anchor="end">{escape(limit_label)}</text>'
    )
    style = "<style>.out{color:var(--faint);fill-opacity:.35}.limit{stroke:var(--s7);stroke-dasharray:5 4}</style>"
    body = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{style}'
        f"{_grid(x_axis, y_axis, width, height, x_label)}{line}{circles}</svg>"
    )
    return _figure(title, [], body)


def timetable(slots: Sequence[Slot], title: str) -> str:
    """Rows are stages: forwards, backwards, and the gaps between them, which are the bubble."""
    stages = 1 + max(slot.stage for slot in slots)
    end = max(slot.end for slot in slots)
    width, row = 1072, 22
    axis = _Axis(0.0, end, 70, width - _RIGHT)
    boxes = "".join(
        f'<rect class="part {"s1" if slot.backward else "s0"}" x="{axis(slot.start)}" y="{8 + row * slot.stage}" '
        f'width="{max(axis(slot.end) - axis(slot.start), 0.3):.1f}" height="{row - 5}"'
        f"{f' fill-opacity={chr(34)}{1 - 0.5 * (slot.chunk % 2):g}{chr(34)}'}>"
        f"<title>{'backward' if slot.backward else 'forward'} of micro-batch {slot.micro_batch}"
        f"{f', chunk {slot.chunk}' if slot.chunk else ''}, stage {slot.stage}: {slot.start:.3g} to {slot.end:.3g} s"
        "</title></rect>"
        for slot in slots
    )
    names = "".join(
        f'<text x="62" y="{8 + row * stage + 13}" text-anchor="end">stage {stage}</text>' for stage in range(stages)
    )
    ticks = axis.ticks(8)
    foot = 8 + row * stages
    labels = "".join(f'<text x="{axis(t)}" y="{foot + 14}" text-anchor="middle">{t:g}</text>' for t in ticks)
    body = (
        f'<svg viewBox="0 0 {width} {foot + 22}" role="img" aria-label="{escape(title)}">{names}{labels}{boxes}</svg>'
    )
    return _figure(title, [], body)
