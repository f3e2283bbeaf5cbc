"""Host time: one thread launches kernels one after another. If the device is faster, it waits."""

from __future__ import annotations

import numpy as np

from fourfold.planning.array_fields import Flag, Number

FORWARD_KERNELS, BACKWARD_KERNELS = 60.0, 100.0
"""Operations of one block in eager PyTorch: matmuls, biases, norms, casts, dropout, copies, activation, and
attention."""
FUSED_SHARE = 0.5
"""Fraction of these operations left with fused norms, rotary embeddings, and attention."""
COLLECTIVE_KERNELS = 3.0
"""Number of launches per collective: the copies around it, and the events that order streams."""
OPTIMIZER_KERNELS = 60.0
"""Number of launches of fused AdamW, norm, and clipping, which are multi-tensor kernels."""


def overlapped(device: Number, host: Number) -> Number:
    """Return the time if device and host work concurrently.

    If they take equally long, neither hides the other fully.
    """
    return (device**4 + host**4) ** 0.25


def block_launches(kernels: float, fused: Flag, collectives: Number) -> Number:
    """Return the launches of one block in one direction, with this number of ``kernels`` in eager PyTorch."""
    return kernels * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives


ROUTER_KERNELS = 25.0
"""Number of operations of a router in eager PyTorch, in each direction: scores, choice, weights, counts, sorting,
gathering, and summing rows."""
GROUPED_KERNELS = 4.0
"""Number of operations of grouped matmuls and of the activation between them, if one kernel computes all experts."""
KERNELS_OF_AN_EXPERT, BACKWARD_KERNELS_OF_AN_EXPERT = 2.0, 4.0
"""Number of matmuls of an expert, if each is launched by itself (Transformer Engine's GroupedLinear)."""
FLOAT8_KERNELS = 3.0
"""Number of additional launches for each of these matmuls in 8 bits: one rounds an input, and two reorder scales."""


def expert_launches(
    experts: Number, grouped: Flag, fused: Flag, in_8: Flag, collectives: Number
) -> tuple[Number, Number]:
    """Return the launches of a router and its experts on a rank, forward and backward."""
    shared = ROUTER_KERNELS * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives
    each = experts * (1 + np.where(in_8, FLOAT8_KERNELS, 0.0))
    one_by_one = KERNELS_OF_AN_EXPERT * each + 2, BACKWARD_KERNELS_OF_AN_EXPERT * each + 4
    forward, backward = (
        shared + np.where(grouped, GROUPED_KERNELS * times, each_way)
        for times, each_way in zip((1, 2), one_by_one, strict=True)
    )
    return forward, backward
