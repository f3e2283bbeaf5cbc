"""Seconds of adding a micro-batch's gradients to those of the micro-batches before it."""

from __future__ import annotations

from fourfold.planning.machine import Number


def accumulate_seconds(parameters: Number, item: Number, gradient: Number, bandwidth: Number) -> Number:
    """Of ``parameters`` whose whole gradients one rank keeps: a micro-batch's, of ``item`` bytes each, are read, the
    sums, of ``gradient`` bytes, read and written."""
    return parameters * (item + 2 * gradient) / bandwidth
