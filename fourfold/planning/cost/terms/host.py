"""Host time: one thread launches kernels one after another, and a device that outruns it waits."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number

FORWARD_KERNELS, BACKWARD_KERNELS = 60.0, 100.0
"""Operations of one block in eager PyTorch: products, biases, norms, casts, dropout, copies, activation, attention."""
FUSED_SHARE = 0.5
"""Share of these with fused norms, rotary embeddings and attention."""
COLLECTIVE_KERNELS = 3.0
"""Launches of a collective: the copies around it, the events that order streams."""
OPTIMIZER_KERNELS = 60.0
"""Fused AdamW, norm and clipping, in multi-tensor kernels."""


def overlapped(device: Number, host: Number) -> Number:
    """Device and host work at the same time; where they take as long as each other neither hides the other fully."""
    return (device**4 + host**4) ** 0.25


def block_launches(kernels: float, fused: Number, collectives: Number) -> Number:
    """Launches of one block in one direction, which has so many ``kernels`` in eager PyTorch."""
    return kernels * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives
