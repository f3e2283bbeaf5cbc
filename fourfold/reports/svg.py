"""Charts as inline SVG: line charts and stacked bars, colored by the page's CSS variables (see style.py)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from fourfold.reports.numbers import downsample, format_number, format_ticks, linear_ticks, log_ticks

COLORS = 12  # series colors that style.py defines; a thirteenth series uses the first again
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 8, 40
_BUCKETS = 400  # two points for about every other pixel of a wide chart


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    """None is a gap."""
    dots: bool = False
    """Mark each point, for series of few points."""


@dataclass(frozen=True)
class Axis:
    """Map from values to pixels along one direction; `log` needs positive values."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, target: int) -> list[float]:
        return (log_ticks if self.log else linear_ticks)(self.low, self.high, target)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    log_y: bool = False,
    from_zero: bool = False,
    width: int = 520,
    height: int = 230,
) -> str:
    """Draw an HTML figure with one line per series, a legend, and the values under the pointer.

    `log_y` makes the y axis logarithmic, unless some value is not positive; `from_zero` makes a linear axis begin at 0.
    Long series are thinned (see ``downsample``). `width` and `height` are in pixels of the SVG, which scales to the
    page.
    """
    series = [Series(s.name, *downsample(s.x, s.y, _BUCKETS), s.dots) for s in series]
    points = [(x, y) for s in series for x, y in zip(s.x, s.y, strict=True) if y is not None]
    if not points:
        return figure(title, [], '<p class="empty">nothing recorded</p>')
    log_y = log_y and all(y > 0 for _, y in points)
    x_axis = Axis(*spread([x for x, _ in points], margin=0.0), LEFT, width - RIGHT)
    y_range = spread([y for _, y in points] + [0.0] * (from_zero and not log_y), margin=0.05, log=log_y)
    y_axis = Axis(*y_range, height - BOTTOM, TOP, log_y)

    lines = "".join(_line(s, index, x_axis, y_axis) for index, s in enumerate(series))
    readout = json.dumps([_readout_points(s, x_axis, y_axis) for s in series], separators=(",", ":"))
    marks = "".join(f'<circle class="mark s{index % COLORS}" r="3.5"/>' for index in range(len(series)))
    svg = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" data-points="{escape(readout)}" '
        f'data-x="{escape(x_label)}">'
        f"{draw_grid(x_axis, y_axis, width, height, x_label)}{lines}"
        f'<line class="rule" y1="{TOP}" y2="{height - BOTTOM}"/>{marks}</svg>'
    )
    return figure(title + (", log scale" if log_y else ""), [s.name for s in series], svg)


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], *, width: int = 520) -> str:
    """Draw an HTML figure with one horizontal bar per entry of `bars`: label to (part to value, none negative).

    Parts of the same name have the same color, in the order of their first appearance. The total stands at the end of
    the bar, a part's value appears under the pointer. Name the unit in `title`.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    totals = {label: sum(bar.values()) for label, bar in bars.items()}
    if not any(totals.values()):
        return figure(title, [], '<p class="empty">nothing recorded</p>')
    left = 16 + 7 * max(map(len, bars))  # about 7 pixels a letter
    right = 16 + 7 * max(len(format_number(total)) for total in totals.values())
    bottom = TOP + 28 * len(bars)
    axis = Axis(0.0, max(totals.values()), left, width - right)
    rows = "".join(_bar(label, bars[label], parts, TOP + 28 * row, axis) for row, label in enumerate(bars))
    ticks = axis.ticks(width // 110)
    labels = "".join(
        f'<line class="grid" x1="{axis(t)}" x2="{axis(t)}" y1="{TOP}" y2="{bottom}"/>'
        f'<text x="{axis(t)}" y="{bottom + 14}" text-anchor="middle">{label}</text>'
        for t, label in zip(ticks, format_ticks(ticks), strict=True)
    )
    svg = f'<svg viewBox="0 0 {width} {bottom + 22}" role="img" aria-label="{escape(title)}">{labels}{rows}</svg>'
    return figure(title, parts, svg)


def figure(title: str, names: Sequence[str], body: str) -> str:
    """Put a caption with a legend before the body; the hover script fills the legend's empty outputs."""
    swatches = (
        [f'<i class="s{index % COLORS}"></i>' for index in range(len(names))] if len(names) > 1 else [""] * len(names)
    )
    keys = "".join(
        f'<span class="key">{swatch}{escape(name)} <output></output></span>'
        for swatch, name in zip(swatches, names, strict=True)
    )
    caption = f'<b>{escape(title)}</b><span class="legend"><span class="at"></span>{keys}</span>'
    return f'<figure class="chart"><figcaption>{caption}</figcaption>{body}</figure>'


def spread(values: Sequence[float], margin: float, log: bool = False) -> tuple[float, float]:
    """Return the range of an axis: that of its values with a margin, never empty, on one side of zero if they are."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log(low), math.log(high)
    if math.isclose(low, high, rel_tol=1e-9, abs_tol=1e-300):
        pad = 0.5 if log else abs(low) / 2 or 1.0
    else:
        pad = (high - low) * margin
    if log:
        return math.exp(low - pad), math.exp(high + pad)
    if low >= 0:
        return max(0.0, low - pad), high + pad
    return low - pad, min(0.0, high + pad) if high <= 0 else high + pad


def draw_grid(x_axis: Axis, y_axis: Axis, width: int, height: int, x_label: str) -> str:
    y_ticks, x_ticks = y_axis.ticks(max(3, height // 45)), x_axis.ticks(width // 110)
    foot = height - BOTTOM
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y_axis(tick)}" y2="{y_axis(tick)}"/>'
        f'<text x="{LEFT - 7}" y="{y_axis(tick) + 3.5:.1f}" text-anchor="end">{label}</text>'
        for tick, label in zip(y_ticks, format_ticks(y_ticks), strict=True)
    )
    columns = "".join(
        f'<text x="{x_axis(tick)}" y="{foot + 16}" text-anchor="middle">{label}</text>'
        for tick, label in zip(x_ticks, format_ticks(x_ticks), strict=True)
    )
    base = f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{foot}" y2="{foot}"/>'
    name = f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>'
    return rows + columns + base + name


def _line(series: Series, index: int, x_axis: Axis, y_axis: Axis) -> str:
    """Draw the path of a series, broken at gaps; points without a neighbor are dots."""
    paths, dots = [], []
    points = zip(series.x, series.y, strict=True)
    for _, run in groupby(points, key=lambda point: point[1] is None):
        pixels = [(x_axis(x), y_axis(y)) for x, y in run if y is not None]
        if len(pixels) > 1:
            paths.append("M" + "L".join(f"{x:g},{y:g}" for x, y in pixels))
        if len(pixels) == 1 or series.dots:
            dots += pixels
    color = f"s{index % COLORS}"
    path = f'<path class="line {color}" d="{"".join(paths)}"/>' if paths else ""
    return path + "".join(f'<circle class="dot {color}" cx="{x:g}" cy="{y:g}" r="2.5"/>' for x, y in dots)


def _readout_points(series: Series, x_axis: Axis, y_axis: Axis) -> list[tuple[float, float, str, str]]:
    """Return pixel and label of every point for the hover script: [x, y, x label, y label]."""
    return [
        (x_axis(x), y_axis(y), format_number(x, 6), format_number(y, 5))
        for x, y in zip(series.x, series.y, strict=True)
        if y is not None
    ]


def _bar(label: str, bar: Mapping[str, float], parts: Sequence[str], top: int, axis: Axis) -> str:
    boxes, done = [], 0.0
    for index, part in enumerate(parts):
        value = bar.get(part, 0.0)
        if value == 0:
            continue
        begin, end = axis(done), axis(done + value)
        boxes.append(
            f'<rect class="part s{index % COLORS}" x="{begin}" y="{top + 4}" width="{end - begin:.1f}" height="18">'
            f"<title>{escape(f'{part}: {format_number(value)}')}</title></rect>"
        )
        done += value
    name = f'<text x="{axis.start - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>'
    total = f'<text class="strong" x="{axis(done) + 6:.1f}" y="{top + 17}">{format_number(done)}</text>'
    return name + "".join(boxes) + total
