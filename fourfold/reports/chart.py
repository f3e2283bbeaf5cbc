"""Draw charts with Apache ECharts. A chart is an ECharts option in plain Python values. The page's script
(assets/charts.js) draws it.

https://echarts.apache.org/en/option.html describes the options. A color such as ``"--s1"`` is a color of the page's
light or dark theme (assets/page.css).
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

LABELED = 12
"""A line with dots shows the values of its points if it has at most this many points."""
NOTHING = "nothing recorded"


def line_chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> str:
    """Return a figure with lines, and a dot at each of their points. The y axis starts at 0.

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
    return figure(title, {"option": option}, height=260)


def figure(title: str, spec: Mapping[str, Any], height: int) -> str:
    """Return an HTML figure with a caption, a legend, and a chart. Values that are not finite become gaps. The reader
    can zoom along the x axis by dragging a box.

    Args:
        title: The caption.
        spec: The data that the page's script draws.
        height: Height in pixels.
    """
    reset = '<button type="button" class="reset" hidden>whole range</button>'
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{reset}<span class="legend"></span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)}" style="height:{height}px"></div>'
        f'<script type="application/json">{to_json(spec)}</script></figure>'
    )


def empty_chart(title: str, text: str = NOTHING) -> str:
    """Return a figure with a text that says why there is no chart."""
    caption = f"<figcaption><b>{escape(title)}</b></figcaption>"
    return f'<figure class="chart">{caption}<p class="empty">{escape(text)}</p></figure>'


def to_json(value: object) -> str:
    """Return JSON that is safe inside a script element. ``<`` is escaped, and numbers that are not finite become
    null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """Return the text of a file in the assets folder."""
    return files("fourfold.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
