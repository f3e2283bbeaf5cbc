"""Draw charts with Apache ECharts. In Python, a chart is an ECharts option: a dictionary of plain values. The page's
script (assets/charts.js) draws the chart in the browser.

https://echarts.apache.org/en/option.html describes these dictionaries. fourfold adds two features:

- A color such as ``"--s1"`` is a color of the page's light or dark theme (assets/page.css).
- The ``"text"`` of a data item appears in a tooltip.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Literal

NOTHING = "nothing recorded"


def figure(
    title: str, spec: Mapping[str, Any], height: int, zoom: Literal["", "x", "xy"] = "", values: str = ""
) -> str:
    """Return an HTML figure with a caption, a legend, and a chart. Values that are not finite become gaps.

    Args:
        title: The caption.
        spec: The data that the page's script draws, such as an ECharts option under the key "option".
        height: Height in pixels.
        zoom: The axes that the reader can zoom by dragging a box. An empty text means no zoom.
        values: The most important values in words, for readers who do not see the chart.
    """
    label = escape(f"{title}. {values}" if values else title)
    reset = '<button type="button" class="reset" hidden>whole range</button>' if zoom else ""
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{reset}<span class="legend"></span></figcaption>'
        f'<div class="plot" role="img" aria-label="{label}" style="height:{height}px"></div>'
        f'<script type="application/json">{to_json({**spec, "zoom": zoom})}</script></figure>'
    )


def empty_chart(title: str, text: str = NOTHING) -> str:
    """Return an HTML figure with a text in place of a chart. The text says why there is no chart."""
    caption = f"<figcaption><b>{escape(title)}</b></figcaption>"
    return f'<figure class="chart">{caption}<p class="empty">{escape(text)}</p></figure>'


def to_json(value: object) -> str:
    """Return JSON that is safe inside an HTML script element. Each ``<`` is escaped. Numbers that are not finite become
    null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """Return the text of a file in the folder fourfold/reports/assets."""
    return files("fourfold.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
