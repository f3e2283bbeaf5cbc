"""Draw heat maps of a run's experts over its steps, from the run's experts.jsonl."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.reports.heatmap import heat_map
from fourfold.reports.numbers import format_number

COLUMNS, CELLS = 60, 4096
"""Largest number of steps in a map, and the approximate largest number of cells."""


def expert_maps(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw the load of each expert in the least even layer.

    Then draw, for each layer, its busiest expert's load, its router's entropy, and the fraction of its rows that were
    dropped, if any.

    A load is relative to the layer's mean. It is 1 if all experts have equally many tokens.
    """
    # The dims are step, layer, and expert.
    loads = [[_relative(rows) for rows in record["tokens_per_expert"]] for record in records]
    busiest = [list(map(max, of_step)) for of_step in loads]
    uneven = max(range(len(busiest[-1])), key=busiest[-1].__getitem__)
    layers = list(map(str, records[-1]["layers"]))
    steps = [format_number(record["step"], 6) for record in records]
    dropped = [record["dropped_share"] for record in records]
    entropy = [record["router_entropy"] for record in records]
    most = math.log(len(loads[-1][uneven]))
    maps = [
        _map(
            f"Load of the experts of layer {layers[uneven]}, relative to the mean",
            [step[uneven] for step in loads],
            steps,
            "expert",
        ),
        _map("Load of each layer's busiest expert, relative to the mean", busiest, steps, "layer", layers),
        _map("Entropy of the router, nats", entropy, steps, "layer", layers, most),
    ]
    return maps + [_map("Rows dropped, share of all", dropped, steps, "layer", layers, 0.0)] * any(map(any, dropped))


def _relative(rows: Sequence[int]) -> list[float]:
    """Return each expert's rows divided by their mean, or 1 without rows."""
    mean = sum(rows) / len(rows)
    return [each / mean if mean else 1.0 for each in rows]


def _map(
    title: str,
    by_step: Sequence[Sequence[float]],
    steps: Sequence[str],
    row_label: str,
    row_names: Sequence[str] | None = None,
    least: float = 2.0,
) -> str:
    """Draw values, given by step and then by row. The scale of colors reaches at least to ``least``."""
    stride = -(-len(steps) // max(8, min(COLUMNS, CELLS // len(by_step[0]))))
    shown = range((len(steps) - 1) % stride, len(steps), stride)  # Always include the last step.
    values = [[by_step[column][row] for column in shown] for row in range(len(by_step[0]))]
    limits = (0.0, max(least, *(max(row) for row in values)))
    names = [steps[column] for column in shown]
    return heat_map(
        title, values, row_label=row_label, column_label="step", limits=limits, row_names=row_names, column_names=names
    )
