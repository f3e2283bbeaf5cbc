"""What a pipeline costs: the bubble, and activations sent from stage to stage."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machine import Number


def bubble_slots(pp: Number, interleave: Number) -> Number:
    """Micro-batches' worth of time that a stage waits in 1F1B, plain or interleaved (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2: (p − 1)/v)."""
    return (pp - 1) / interleave


def transfer_seconds(size: Number, stride: Number, gpus: Number, bandwidth_in: Number, bandwidth_out: Number,
                     latency: Number, gpus_per_node: Number) -> Number:  # fmt: skip
    """Of ``size`` bytes to the next stage, ``stride`` ranks further."""
    inside = stride < gpus_per_node
    return size / np.where(inside, bandwidth_in, bandwidth_out) + latency
