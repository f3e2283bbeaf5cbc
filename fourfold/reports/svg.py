"""Charts as inline SVG: axes and captions of those that ECharts does not draw yet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fourfold.reports.numbers import format_ticks, linear_ticks, log_ticks

COLORS = 12  # series colors that page.css defines; a thirteenth series uses the first again
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 8, 40


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
