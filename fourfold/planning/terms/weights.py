"""Bytes that memory moves in a micro-batch for a rank's weights, beside the products: gradients added, copies."""

from __future__ import annotations

from fourfold.planning.machine import Number


def added_bytes(item: Number, gradient: Number) -> Number:
    """Bytes moved for a parameter whose gradient is added to that of the micro-batches before: read in the step's type
    of ``item`` bytes, the sum of ``gradient`` bytes read and written."""
    return item + 2 * gradient


def scattered_bytes(item: Number, gradient: Number) -> Number:
    """Bytes moved for a parameter whose gradient is reduce-scattered: read, and written to the collective's buffer."""
    return item + gradient


def gathered_bytes(item: Number) -> Number:
    """Bytes moved for a parameter that is all-gathered: read from the collective's buffer, and written."""
    return 2 * item
