"""Define a line of the trace (all collectives of one kind in a step), and name the group of ranks that run them."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config.run import RunConfig

FLATTENED = (("dp", "cp"), ("dp", "z"), ("dp", "cp", "z"), ("y", "x"))
"""Sets of axes whose ranks together form one group with its own name (parallel.grid)."""


@dataclass(frozen=True)
class Line:
    """All collectives of one kind in a step, as ``fourfold trace`` counts them."""

    axis: str
    op: str
    purpose: str
    count: int
    bytes: int


def axis_name(run: RunConfig, axes: tuple[str, ...]) -> str:
    """Return the name of the group over ``axes``. If only one axis has more than one rank, this is the axis's name.
    Otherwise, it is the first name that includes all axes with more than one rank."""
    longer = {axis for axis in axes if getattr(run.parallel, axis) > 1}
    if len(longer) <= 1:
        return next(iter(longer), axes[-1])
    same = (flat for flat in FLATTENED if {a for a in flat if getattr(run.parallel, a) > 1} == longer)
    return next(("_".join(flat) for flat in same), "world")
