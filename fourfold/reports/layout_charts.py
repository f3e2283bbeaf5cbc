"""Chart a plan's layouts: step time against memory, and one line per layout over its choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.plan import describe_layout
from fourfold.reports.chart import chart
from fourfold.reports.layout_columns import CHOICES, choices, gigabytes, schedule
from fourfold.reports.layout_sample import WIDEST, Shown
from fourfold.reports.scatter_charts import Dot, PointGroup, scatter

LINES = 300
"""Largest number of lines in the parallel coordinates."""
FITS = "fits"
OWN_COLORS = {FITS: "--s0", "best": "--s1", "yours": "--s3"}


def memory_chart(layouts: Sequence[Shown], machine: Machine, rejected: Mapping[str, int], fitting: int) -> str:
    """Draw step time against memory, with one color for layouts that fit and one for each reason of refusal.

    Args:
        layouts: The layouts to show.
        machine: The machine.
        rejected: Number of layouts that each reason refuses.
        fitting: Number of layouts that fit.
    """
    dots: dict[str, list[Dot]] = {**{reason: [] for reason in rejected}, FITS: [], "yours": [], "best": []}
    for layout in layouts:
        if 0 < layout.memory < WIDEST * machine.memory and 0 < layout.seconds < float("inf"):
            own = {"1": "best", "yours": "yours"}.get(layout.label, FITS)
            dots[layout.refused or own].append(Dot(layout.memory / 1e9, layout.seconds, _text(layout)))
    counts = {FITS: fitting, **rejected}
    groups = [
        PointGroup(
            f"{kind} ({len(some):,} of {counts[kind]:,})" if kind in counts else kind,
            some,
            OWN_COLORS.get(kind, f"--s{4 + place % 8}"),
            size=6 if kind in counts else 12,
        )
        for place, (kind, some) in enumerate(dots.items())
    ]
    return scatter(
        "Step time against memory",
        groups,
        x_label="GB of the fullest rank",
        y_label="seconds a step (log)",
        limit=float(machine.memory) / 1e9,
        limit_label=f"{gigabytes(float(machine.memory))} GB",
        height=460,
    )


def _text(layout: Shown) -> str:
    text = f"{describe_layout(layout.work)}\n{layout.seconds:.4g} s, {gigabytes(layout.memory)} GB"
    if layout.refused:
        text += f"\nrefused: {layout.refused}" + (
            "" if layout.is_legal else " (the formulas give these numbers, but it cannot run)"
        )
    return text


def choice_lines(layouts: Sequence[Shown]) -> str:
    """Draw a line through all choices of each layout that fits, colored by its step time.

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
    option = {
        "parallel": {},
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
