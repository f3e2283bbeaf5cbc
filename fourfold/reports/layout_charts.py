"""Charts of a plan's layouts: step time against memory, and lines over what they choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.plan import describe_layout
from fourfold.reports.chart import chart
from fourfold.reports.layout_columns import CHOICES, choices, gigabytes, schedule
from fourfold.reports.layout_sample import WIDEST, Shown

LINES = 300
"""The most lines of the parallel coordinates."""
FITS = "fits"


def memory_chart(layouts: Sequence[Shown], machine: Machine, rejected: Mapping[str, int], fitting: int) -> str:
    """Draw step time against memory, with a series for the layouts that fit and for each reason of a refusal.

    rejected: how many layouts each reason refuses. fitting: how many fit.
    """
    points: dict[str, list[dict[str, Any]]] = {"best": [], "yours": [], FITS: []}
    for layout in layouts:
        if 0 < layout.memory < WIDEST * machine.memory and 0 < layout.seconds < float("inf"):
            own = {"1": "best", "yours": "yours"}.get(layout.label, FITS)
            points.setdefault(layout.refused or own, []).append(_point(layout))
    counts = {FITS: fitting, **rejected}
    series = []
    for number, (kind, data) in enumerate(points.items()):
        if data:
            name = f"{kind} ({len(data):,} of {counts[kind]:,})" if kind in counts else kind
            series.append(_dots(name, data, kind, number))
    label = {"formatter": f"{gigabytes(machine.memory)} GB", "color": "--faint", "position": "insideEndTop"}
    series[0]["markLine"] = {
        "symbol": "none", "silent": True, "lineStyle": {"color": "--s7", "type": "dashed"},
        "data": [{"xAxis": machine.memory / 1e9, "label": label}],
    }  # fmt: skip
    seconds = [point["value"][1] for data in points.values() for point in data]
    low, high = min(seconds), max(seconds)
    is_wide = high > 4 * low
    option = {
        "xAxis": {"type": "value", "name": "GB of the fullest rank", "min": 0},
        "yAxis": {
            "type": "log" if is_wide else "value", "logBase": 2, "name": "seconds a step" + " (log)" * is_wide,
            "min": 0.93 * low, "max": 1.07 * high, "axisLabel": {"showMinLabel": False, "showMaxLabel": False},
        },
        "grid": {"top": 36},
        "tooltip": {"trigger": "item"},
        "series": series,
    }  # fmt: skip
    return chart("Step time against memory", option, height=460, zoom="xy")


def _point(layout: Shown) -> dict[str, Any]:
    size = f"{layout.seconds:.4g} s, {gigabytes(layout.memory)} GB"
    text = f"{describe_layout(layout.work)}\n{size}"
    if layout.refused:
        text += f"\nrefused: {layout.refused}" + ("" if layout.is_legal else " (where the formulas would put it)")
    return {"value": [layout.memory / 1e9, layout.seconds], "text": text}


def _dots(name: str, data: list[dict[str, Any]], kind: str, number: int) -> dict[str, Any]:
    if kind in ("best", "yours"):
        size, symbol, color = 14, "diamond", {"best": "--s1", "yours": "--s3"}[kind]
    else:
        size, symbol, color = 6, *(("circle", "--s0") if kind == FITS else ("emptyCircle", f"--s{1 + number % 11}"))
    look = {"symbolSize": size, "symbol": symbol, "itemStyle": {"color": color, "opacity": 0.8}}
    return {"type": "scatter", "name": name, "data": data, "z": 2 + (kind == FITS) + 2 * (size > 6), **look}


def choice_lines(layouts: Sequence[Shown]) -> str:
    """Draw a line for each layout that fits over all that layouts choose, colored by its step time.

    A brush along an axis shows only the layouts that pass through it, in the table too.
    """
    fitting = [layout for layout in layouts if not layout.refused][:LINES]
    cells = [{**choices(layout.work), "schedule": schedule(layout.work)} for layout in fitting]
    axes = [name for name in (*CHOICES[:-1], "schedule") if len({row.get(name) for row in cells}) > 1]
    values = {name: sorted({row[name] for row in cells}, key=_in_order) for name in axes}
    seconds = [layout.seconds for layout in fitting]
    data = [
        {"value": [*(values[name].index(row[name]) for name in axes), layout.seconds],
         "text": f"{layout.label}: {describe_layout(layout.work)}\n{layout.seconds:.4g} s"}
        for row, layout in zip(cells, fitting, strict=True)
    ]  # fmt: skip
    parallel_axes: list[dict[str, Any]] = [
        {"dim": place, "name": name, "type": "category", "data": [value or "none" for value in values[name]]}
        for place, name in enumerate(axes)
    ]
    parallel_axes.append({"dim": len(axes), "name": "s/step", "type": "value", "scale": True})
    look = {
        "axisLine": {"lineStyle": {"color": "--faint"}},
        "axisLabel": {"color": "--ink", "fontSize": 11, "textBorderColor": "--card", "textBorderWidth": 3},
        "axisTick": {"show": False}, "nameTextStyle": {"color": "--ink", "fontWeight": 600},
        "nameLocation": "start", "nameGap": 14,
    }  # fmt: skip
    narrow = {"layout": "vertical", "left": 104, "right": 24, "top": 12, "bottom": 28}
    option = {
        "parallel": {"left": 30, "right": 50, "top": 20, "bottom": 30, "parallelAxisDefault": look},
        "media": [{"query": {"maxWidth": 640}, "option": {"parallel": narrow}}],
        "parallelAxis": parallel_axes,
        "visualMap": {
            "type": "continuous", "show": False, "dimension": len(axes), "min": min(seconds), "max": max(seconds),
            "inRange": {"color": ["--s1", "--s3", "--s0"]},
        },
        "tooltip": {"trigger": "item"},
        "series": [
            {"type": "parallel", "name": "layouts", "data": data, "lineStyle": {"width": 1.2, "opacity": 0.45},
             "emphasis": {"lineStyle": {"width": 3, "opacity": 1}}, "inactiveOpacity": 0.03}
        ],
    }  # fmt: skip
    title = "What layouts choose: orange fast, blue slow; drag along an axis to keep some"
    return chart(title, option, height=460)


def _in_order(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)
