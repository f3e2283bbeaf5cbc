"""A line of collectives in a step, and the names of the groups that have them."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config.run import RunConfig

FLATTENED = (("dp", "cp"), ("dp", "z"), ("dp", "cp", "z"), ("y", "x"))
"""Sets of axes that together have one group and one name (parallel.grid)."""


@dataclass(frozen=True)
class Line:
    """All collectives of one kind in a step, as ``fourfold trace`` counts them."""

    axis: str
    op: str
    purpose: str
    count: int
    bytes: int


def axis_name(run: RunConfig, axes: tuple[str, ...]) -> str:
    """Return the name of the group over ``axes``. This is the only axis longer than 1, or else the first name that has
    all longer axes."""
    longer = {axis for axis in axes if getattr(run.parallel, axis) > 1}
    if len(longer) <= 1:
        return next(iter(longer), axes[-1])
    same = (flat for flat in FLATTENED if {a for a in flat if getattr(run.parallel, a) > 1} == longer)
    return next(("_".join(flat) for flat in same), "world")
