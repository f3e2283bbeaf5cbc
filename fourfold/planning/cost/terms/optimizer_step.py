"""Seconds of the optimizer: every state is read and written once, and gradients are read for the norm."""

from __future__ import annotations

from fourfold.planning.cases import Number

BYTES = 34.0
"""Bytes moved per parameter: fp32 weight, two moments read and written (24), gradient read twice (8), the 16-bit copy
(2)."""


def optimizer_seconds(parameters: Number, bandwidth: Number) -> Number:
    """AdamW over the ``parameters`` that one rank steps."""
    return parameters * BYTES / bandwidth
