"""Count the kernels that the host launches, and combine the host's time with the device's time.

One host thread launches kernels one after another. If the device is faster, it waits for the host.
"""

import numpy as np

from fourfold.planning.array_fields import Flag, Number

FORWARD_KERNELS, BACKWARD_KERNELS = 60.0, 100.0
"""Number of kernels that one block launches in eager PyTorch: matmuls, biases, norms, casts, dropout, copies,
activation, and attention."""
FUSED_SHARE = 0.5
"""Fraction of a block's kernels that remain if norms, rotary embeddings, and attention are fused."""
COLLECTIVE_KERNELS = 3.0
"""Number of launches per collective: the copies before and after it, and the events that order streams."""
BLOCKING = 1.5
"""Host time of a kernel if the host waits until the kernel is done, relative to the host time of a launch. We assume
that the driver takes about 5 µs to notify the host."""
OPTIMIZER_KERNELS = 60.0
"""Number of launches of fused AdamW, gradient norm, and clipping, which are multi-tensor kernels."""


def overlapped(device: Number, host: Number) -> Number:
    """Return the total seconds if device and host work concurrently.

    The total is longer than either of the two times, because neither hides the other completely. The total
    exceeds the longer time the most if both times are equal.
    """
    return (device**4 + host**4) ** 0.25


def block_launches(kernels: float, fused: Flag, collectives: Number) -> Number:
    """Return the number of kernel launches in the forward or the backward pass of one block. ``kernels`` is the number
    in eager PyTorch, without collectives."""
    return kernels * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives


ROUTER_KERNELS = 25.0
"""Number of kernels that a router launches in eager PyTorch, in each direction: scores, choice, weights, counts,
sorting, gathering, and summing rows."""
GROUPED_KERNELS = 4.0
"""Number of kernels that the matmuls and the activation of all experts launch in the forward pass, if each of these
kernels computes all experts at once."""
KERNELS_OF_AN_EXPERT, BACKWARD_KERNELS_OF_AN_EXPERT = 2.0, 4.0
"""Number of matmuls per expert in the forward pass and in the backward pass, if each matmul is launched separately
(Transformer Engine's GroupedLinear)."""
PARAMETERS_OF_AN_EXPERT, BACKWARD_PARAMETERS_OF_AN_EXPERT = 2.0, 6.0
"""Host time per expert to handle its two weights as separate parameters, in units of a launch. The forward pass handles
views and saved tensors. The backward pass handles gradient buffers and the hooks of data parallelism. (On H100s, a
block of Megatron-LM takes 0.15 to 0.19 ms longer per additional expert on a rank.)"""
FLOAT8_KERNELS = 3.0
"""Number of additional launches per expert matmul in 8 bits: one launch rounds an input, and two launches reorder
scales."""


def expert_launches(
    experts: Number, grouped: Flag, fused: Flag, in_8: Flag, collectives: Number
) -> tuple[Number, Number]:
    """Return the number of kernel launches of a router and its experts on a rank, in forward and backward.

    Args:
        experts: Number of experts on the rank.
        grouped: Whether each matmul is one kernel for all experts of the rank.
        fused: Whether the router's operations are fused.
        in_8: Whether the experts' matmuls run in 8 bits.
        collectives: Number of collectives in each of the two passes.
    """
    shared = ROUTER_KERNELS * np.where(fused, FUSED_SHARE, 1.0) + COLLECTIVE_KERNELS * collectives
    each = experts * (1 + np.where(in_8, FLOAT8_KERNELS, 0.0))
    one_by_one = (
        KERNELS_OF_AN_EXPERT * each + PARAMETERS_OF_AN_EXPERT * experts + 2,
        BACKWARD_KERNELS_OF_AN_EXPERT * each + BACKWARD_PARAMETERS_OF_AN_EXPERT * experts + 4,
    )
    forward, backward = (
        shared + np.where(grouped, GROUPED_KERNELS * times, each_way)
        for times, each_way in zip((1, 2), one_by_one, strict=True)
    )
    return forward, backward
