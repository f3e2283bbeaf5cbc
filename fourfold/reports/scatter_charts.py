"""Draw a scatter chart of many layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.reports.chart import chart, empty_chart


@dataclass(frozen=True)
class Dot:
    """A point of a scatter. ``text`` appears under the pointer."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class PointGroup:
    """Points in one color of the page, ``size`` pixels wide. Later groups are drawn on top."""

    name: str
    dots: Sequence[Dot]
    color: str
    size: float = 8
    opacity: float = 0.8


def scatter(
    title: str,
    groups: Sequence[PointGroup],
    *,
    x_label: str,
    y_label: str,
    limit: float | None = None,
    limit_label: str = "",
    height: int = 400,
) -> str:
    """Draw points on a linear x axis and a logarithmic y axis, with a vertical line at ``limit``."""
    series: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "name": group.name,
            "data": [{"value": [dot.x, dot.y], "text": dot.text} for dot in group.dots],
            "symbolSize": group.size,
            "itemStyle": {"color": group.color, "opacity": group.opacity},
            "z": 2 + rank,
        }
        for rank, group in enumerate(groups)
        if group.dots
    ]
    if not series:
        return empty_chart(title)
    if limit is not None:
        series[0]["markLine"] = {
            "silent": True,
            "symbol": "none",
            "data": [{"xAxis": limit}],
            "lineStyle": {"color": "--s7", "type": "dashed"},
            "label": {"formatter": limit_label, "position": "end", "color": "--faint"},
        }
    largest = max([dot.x for group in groups for dot in group.dots] + [limit or 0.0])
    option = {
        "xAxis": {"type": "value", "name": x_label, "min": 0, "max": largest * 1.03},
        "yAxis": {"type": "log", "name": y_label},
        "series": series,
    }
    return chart(title, option, height=height, zoom="xy")
