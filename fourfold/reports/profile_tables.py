"""Print the profile that ``fourfold train --profile`` has recorded."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from fourfold.reports.tables import in_unit, print_table
from fourfold.training.console import byte_unit


def profile_tables(path: Path) -> None:
    """Print how the time of a step was spent. The first table has the collectives of each axis, as means over the
    processes. The second table divides the whole step. Its first row has the means over the processes. With several
    processes, its second row is for the process that computes longest."""
    if not path.is_file():
        print("No profile: the run ended before the fifth step after its start.")
        return
    record = json.loads(path.read_text())
    ranks, steps = record["ranks"], record["steps"]
    means = {
        axis: [fmean(figures) for figures in zip(*(_figures(rank, axis) for rank in ranks), strict=True)]
        for axis in sorted({axis for rank in ranks for axis in rank["axes"]})
    }
    if means:
        name, unit = byte_unit(max(mean[1] for mean in means.values()))
        rows = [[axis, f"{n:,.0f}", in_unit(size, unit), *map(_ms, times)] for axis, (n, size, *times) in means.items()]
        title = f"Collectives of one step: mean of steps {steps[0]} to {steps[-1]}, and of {len(ranks)} processes"
        print_table(title, ("axis", "calls", name, "issued ms", "hidden ms", "exposed ms"), rows)
    busiest = max(ranks, key=lambda rank: float(rank["compute"]))
    parts = ("seconds", "compute", "exposed", "idle")
    shown = [["mean", *(_ms(fmean(rank[part] for rank in ranks)) for part in parts)]]
    if len(ranks) > 1:
        shown.append([f"rank {busiest['rank']}, which computes longest", *(_ms(busiest[part]) for part in parts)])
    print_table("One step", ("", "ms", "compute ms", "exposed ms", "idle ms"), shown)
    print(f"Traces, for ui.perfetto.dev: {path.parent}")


def _figures(rank: Mapping[str, Any], axis: str) -> list[float]:
    """Return five values for the collectives that a rank issues over an axis: the number of calls, the bytes, and the
    issued, hidden, and exposed seconds (see ``AxisTimes``).

    All values are 0 on a rank without such collectives.
    """
    lines = [line for line in rank["collectives"] if line["axis"] == axis]
    times = rank["axes"].get(axis, {})
    sent = [sum(line[key] for line in lines) for key in ("count", "bytes")]
    return sent + [times.get(kind, 0.0) for kind in ("issued", "hidden", "exposed")]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
