"""Draw line charts and stacked bars, as ECharts options (see chart.py)."""

from collections.abc import Mapping, Sequence

from fourfold.reports.chart import empty_chart, figure
from fourfold.reports.numbers import format_number

LABELED = 12
"""If a line has at most this number of points, the chart prints the value of each point above its dot."""
_AT_END = {"show": True, "position": "right", "color": "--ink", "fontWeight": 600}


def line_chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> str:
    """Return an HTML figure with lines, and a dot at each of their points. The y axis starts at 0.

    Args:
        title: The caption.
        lines: For each line, its name and its points (x, y).
        x_label: Label of the x axis.
        y_label: Label of the y axis.
    """
    places = [x for points in lines.values() for x, _ in points]
    if not places:
        return empty_chart(title)
    near_zero = 0 <= min(places) < max(places) / 4
    style = {"type": "line", "symbol": "circle", "symbolSize": 6, "lineStyle": {"width": 1.75}}
    option = {
        "xAxis": {"type": "value", "name": x_label, "scale": True, "min": 0 if near_zero else None},
        "yAxis": {"type": "value", "name": y_label},
        "tooltip": {"trigger": "axis"},
        "series": [
            {**style, "name": name, "data": points, "label": {"show": len(points) <= LABELED, "position": "top"}}
            for name, points in lines.items()
        ],
    }
    return figure(title, {"option": option}, height=260, zoom="x")


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, float]], *, x_label: str) -> str:
    """Return an HTML figure with stacked horizontal bars. The first bar is at the top. At the end of each bar is a
    number, the sum of the bar's parts.

    Args:
        title: The caption.
        bars: For each bar, its name and the values (≥ 0) of its parts. Parts with the same name have the same color in
            all bars.
        x_label: Label of the x axis.
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
    return figure(title, {"option": option}, height=64 + 28 * len(bars))
