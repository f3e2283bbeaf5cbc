"""Bytes that memory moves in a micro-batch for a rank's weights, beside the products: gradients added, copies."""

from __future__ import annotations

from fourfold.planning.cases import Number


def added_bytes(item: Number, gradient: Number) -> Number:
    """For a parameter whose gradient is added to that of the micro-batches before: read in the step's type of ``item``
    bytes, the sum of ``gradient`` bytes read and written."""
    return item + 2 * gradient


def copied_bytes(read: Number, written: Number) -> Number:
    """For a parameter that is copied to or from a collective's buffer, or cast: bytes of it there and here."""
    return read + written
