"""Draw line charts and stacked bars, as ECharts options (see chart.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.reports.chart import chart, empty_chart
from fourfold.reports.numbers import downsample, format_number

BUCKETS = 1000
"""Number of buckets that a long line is divided into. Each bucket keeps two points."""
LABELED = 12
"""A line with dots shows the values of its points if it has at most this many points."""
_AT_END = {"show": True, "position": "right", "color": "--ink", "fontWeight": 600}


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    """The values. None is a gap in the line."""
    dots: bool = False
    """Whether to mark each point, for series with few points."""
    joined: bool = True
    """Whether to draw lines between the points."""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str = "",
    log_y: bool = False,
    from_zero: bool = False,
    height: int = 260,
) -> str:
    """Return a figure with one line per series.

    ``log_y`` makes the y axis logarithmic, unless a value is not positive. ``from_zero`` starts a linear axis at 0.
    Long series are thinned (see ``downsample``).
    """
    values = [y for each in series for y in each.y if y is not None]
    if not values:
        return empty_chart(title)
    log_y = log_y and all(value > 0 for value in values)
    places = [x for each in series for x in each.x]
    near_zero = 0 <= min(places) < max(places) / 4
    option = {
        "xAxis": {"type": "value", "name": x_label, "scale": True, "min": 0 if near_zero else None},
        "yAxis": {"type": "log" if log_y else "value", "name": y_label, "scale": not from_zero},
        "tooltip": {"trigger": "axis"},
        "series": [_line(each) for each in series],
    }
    return chart(title, option, height=height, zoom="x")


def _line(series: Series) -> dict[str, Any]:
    x, y = downsample(series.x, series.y, BUCKETS)
    return {
        "type": "line",
        "name": series.name,
        "data": list(zip(x, y, strict=True)),
        "symbol": "circle",
        "symbolSize": 6,
        "showSymbol": series.dots or len(x) == 1,
        "lineStyle": {"width": 1.75 if series.joined else 0},
        "label": {"show": series.dots and len(x) <= LABELED, "position": "top"},
    }


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], *, x_label: str) -> str:
    """Return a figure with a horizontal bar for each entry of ``bars``, the first on top. An entry maps parts to values
    ≥ 0.

    A part has the same color in all bars. The sum is written at the end of each bar.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    totals = [sum(bar.values()) for bar in bars.values()]
    if not any(totals):
        return empty_chart(title)
    style = {"type": "bar", "stack": "all", "barMaxWidth": 20}
    series = [{**style, "name": part, "data": [bar.get(part, 0.0) for bar in bars.values()]} for part in parts]
    sums = [{"value": 0, "text": text, "label": {"formatter": text}} for text in map(format_number, totals)]
    option = {
        "xAxis": {"type": "value", "name": x_label},
        "yAxis": {"type": "category", "data": list(bars), "inverse": True},
        "grid": {"top": 6, "right": 56},
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}},
        "series": [*series, {**style, "name": "total", "silent": True, "data": sums, "label": _AT_END}],
    }
    return chart(title, option, height=64 + 28 * len(bars))
