"""Draw charts with Apache ECharts. Each chart is an option in plain Python, which the page's script draws
(assets/charts.js).

https://echarts.apache.org/en/option.html describes options. There are two additions. A color such as ``"--s1"`` is the
page's color, light or dark (assets/page.css). A data item's ``"text"`` appears under the pointer.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Literal

Option = Mapping[str, Any]
NOTHING = "nothing recorded"


def chart(title: str, option: Option, *, height: int = 260, zoom: Literal["", "x", "xy"] = "") -> str:
    """Return an HTML figure with a caption, a legend, and the chart that ``option`` describes, ``height`` pixels high.

    ``zoom`` names the directions that dragging a box can zoom. Numbers that are not finite become gaps.
    """
    return figure(title, {"option": option}, height, zoom)


def figure(title: str, spec: Mapping[str, Any], height: int, zoom: Literal["", "x", "xy"] = "") -> str:
    """Return the HTML figure that the page's script draws from ``spec``."""
    reset = '<button type="button" class="reset" hidden>whole range</button>' if zoom else ""
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{reset}<span class="legend"></span></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)}" style="height:{height}px"></div>'
        f'<script type="application/json">{to_json({**spec, "zoom": zoom})}</script></figure>'
    )


def empty_chart(title: str, text: str = NOTHING) -> str:
    """Return a figure that says why there is no chart."""
    caption = f"<figcaption><b>{escape(title)}</b></figcaption>"
    return f'<figure class="chart">{caption}<p class="empty">{escape(text)}</p></figure>'


def to_json(value: object) -> str:
    """Return JSON that is safe inside a script element. It has no ``<``, and null in place of numbers that are not
    finite."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    """Read a file from the assets folder."""
    return files("fourfold.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
