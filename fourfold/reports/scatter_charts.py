"""Charts of many layouts: a scatter, and parallel coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.reports.chart import chart, empty_chart
from fourfold.reports.numbers import format_number


@dataclass(frozen=True)
class Dot:
    """A point of a scatter; `text` appears under the pointer."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Group:
    """Points of one color of the page, `size` pixels wide; those of later groups are drawn on top."""

    name: str
    dots: Sequence[Dot]
    color: str
    size: float = 8
    opacity: float = 0.8


def scatter(
    title: str,
    groups: Sequence[Group],
    *,
    x_label: str,
    y_label: str,
    limit: float | None = None,
    limit_label: str = "",
    height: int = 400,
) -> str:
    """Draw points on a linear x and a logarithmic y axis, with a vertical line at `limit`."""
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


@dataclass(frozen=True)
class Line:
    """A line through all coordinates: a number or word of each; `text` appears under the pointer."""

    values: Sequence[str | float]
    text: str
    color: str = "--s0"
    opacity: float = 0.6
    width: float = 1.5
    dashed: bool = False


def parallel_coordinates(title: str, names: Sequence[str], paths: Sequence[Line], *, height: int = 360) -> str:
    """Draw a vertical axis for each of `names`, with its values evenly spaced in order, and a line for each path.

    Later paths are drawn on top. Dragging along an axis selects the paths that pass there.
    """
    if len(names) < 2 or not paths:
        return empty_chart(title, "nothing to compare")
    axes = []
    places: list[dict[str | float, int]] = []
    for dim, name in enumerate(names):
        among = sorted({path.values[dim] for path in paths}, key=lambda value: (isinstance(value, str), value))
        places.append({value: place for place, value in enumerate(among)})
        labels = [value if isinstance(value, str) else format_number(value, 4) for value in among]
        axes.append({"dim": dim, "name": name, "type": "category", "data": labels, "boundaryGap": len(among) == 1})
    data = [
        {
            "value": [place[value] for place, value in zip(places, path.values, strict=True)],
            "text": path.text,
            "lineStyle": {
                "color": path.color,
                "opacity": path.opacity,
                "width": path.width,
                "type": "dashed" if path.dashed else "solid",
            },
        }
        for path in paths
    ]
    option = {
        "parallelAxis": axes,
        "parallel": {},
        "series": [{"type": "parallel", "data": data, "name": title, "emphasis": {"lineStyle": {"width": 4}}}],
    }
    return chart(title, option, height=height)
