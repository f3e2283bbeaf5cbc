"""Write both tables of docs/second_axis.md, with the planner's predictions: python docs/second_axis.py"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from validation_page.cells import put_between, table
from validation_page.published_runs import base_of
from validation_page.published_table import published_table

from fourfold.errors import UserError
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.search.plan import Prediction, make_plan
from fourfold.planning.search.space import SearchLimits

PAGE = Path(__file__).parent / "second_axis.md"
MACHINES = ("dgx-a100", "dgx-h100", "gb200", "perlmutter", "frontier", "alps")
DEGREES = (4, 8, 16, 32)
"""The columns of the first table: numbers of tensor-parallel ranks, x · y."""
MODEL, SEQ, GPUS = "gpt-80b", 2048, 256
BATCHES = (16, 64, 256, 1024)
"""Numbers of sequences per step. z · dp cannot exceed the number of sequences, so with fewer sequences than GPUs, x · y
is at least GPUs / sequences."""
YS = (2, 4, 8)
LIMITS = SearchLimits(fixed=(("cp", 1), ("pp", 1)), zeros=(0, 3))
"""Limits of the search: only AxoNN's axes x, y, z, and dp."""


class Cell(NamedTuple):
    """The fastest layout with y = 1 (``one``), and the fastest layout with y > 1 (``more``). Each is None if no such
    layout is legal and fits."""

    one: Prediction | None
    more: Prediction | None

    @property
    def fastest(self) -> Prediction | None:
        return min((p for p in self if p is not None), key=lambda p: p.seconds, default=None)

    @property
    def gain(self) -> float:
        """Return how much longer a step takes with y = 1 than with y > 1, as a fraction (0.1 means 10 % longer)."""
        assert self.one is not None and self.more is not None
        return self.one.seconds / self.more.seconds - 1

    @property
    def text(self) -> str:
        """Return the sizes of x and y in the faster layout, and ``gain``. The sizes are in bold if y > 1."""
        best = self.fastest
        if best is None:
            return "none"
        shape = f"{int(best.work.layout.x)} × {int(best.work.layout.y)}"
        shape = f"**{shape}**" if best is self.more else shape
        return shape if self.one is None or self.more is None else f"{shape} ({percent(self.gain)})"


def fastest(machine: str, model: str, gpus: int, batch: int, fixed: Iterable[dict[str, int]]) -> Prediction | None:
    """Search once for each dictionary in ``fixed``, with the axis sizes in this dictionary. Return the fastest layout
    of all searches, or None if no layout is legal and fits."""
    where, found = load_machine(machine), []
    for sizes in fixed:
        limits = replace(LIMITS, fixed=(*LIMITS.fixed, *sizes.items()))
        try:
            found.append(make_plan(base_of(model, SEQ, batch), where, constants_for(where), gpus, 1, limits).best)
        except UserError:  # No layout is legal and fits.
            continue
    return min(found, key=lambda p: p.seconds, default=None)


def of_degree(machine: str, batch: int, degree: int) -> Cell:
    """Return two layouts with x · y = ``degree``: the fastest one with y = 1, and the fastest one with y > 1."""
    one, more = (
        fastest(machine, MODEL, GPUS, batch, [{"x": degree // y, "y": y} for y in ys if y < degree])
        for ys in ((1,), YS)
    )
    return Cell(one, more)


def of_all(machine: str, model: str, gpus: int, batch: int) -> Cell:
    """Return two layouts with any x · y: the fastest one with y = 1, and the fastest one with y > 1."""
    one, more = (fastest(machine, model, gpus, batch, [{"y": y} for y in ys]) for ys in ((1,), YS))
    return Cell(one, more)


def the_map() -> list[str]:
    rows = []
    for machine in MACHINES:
        for batch in BATCHES:
            cells = [of_degree(machine, batch, degree) for degree in DEGREES]
            cells.append(of_all(machine, MODEL, GPUS, batch))
            rows.append((machine, f"{batch:,}", *(cell.text for cell in cells)))
    return table(("machine", "batch", *(f"x·y = {degree}" for degree in DEGREES), "any x·y"), rows)


def runs_of_axonn() -> list[str]:
    rows = []
    for row in published_table()["figure"]:
        if "layout" not in row:
            cell = of_all(row["machine"], row["model"], row["gpus"], row["batch"])
            assert cell.one is not None and cell.more is not None
            seconds = [f"{p.seconds:.2f}: {p.describe()}" for p in cell if p is not None]
            rows.append((row["machine"], f"{row['gpus']:,}", row["model"], *seconds, percent(cell.gain)))
    return table(("machine", "GPUs", "model", "y = 1", "y > 1", "gain of y"), rows)


def percent(share: float) -> str:
    return f"{share:+.0%}".replace("-", "−") if abs(share) >= 0.005 else "0%"


def main() -> None:
    for name, lines in (("map", the_map()), ("AxoNN", runs_of_axonn())):
        put_between(PAGE, f"docs/second_axis.py: {name}", lines)


if __name__ == "__main__":
    main()
