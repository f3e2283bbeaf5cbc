"""Host time: kernels are launched one after another by one thread, and a device that outruns it waits."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number

FORWARD_KERNELS, BACKWARD_KERNELS = 60.0, 100.0
"""Operations of one block in eager PyTorch: products, biases, norms, casts, dropout, copies, activation, attention."""
FUSED_SHARE = 0.5
"""With fused norms, rotary embeddings and attention."""
COLLECTIVE_KERNELS = 3.0
"""Launches of a collective: the copies around it, the events that order streams."""
OPTIMIZER_KERNELS = 60.0
"""Fused AdamW, norm and clipping, in multi-tensor kernels."""


def overlapped(device: Number, host: Number) -> Number:
    """Device and host work at the same time; where they take as long as each other neither hides the other fully."""
    return (device**4 + host**4) ** 0.25


def block_launches(backward: bool, recompute: Number, fused: Number, collectives: Number) -> Number:
    """Kernels of one block in one direction."""
    forward = FORWARD_KERNELS * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives
    if not backward:
        return forward
    own = BACKWARD_KERNELS * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives
    return own + np.where(recompute == 2, forward, np.where(recompute == 1, 4.0, 0.0))
