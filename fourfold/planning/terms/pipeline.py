"""What a pipeline costs: the bubble, and activations sent from stage to stage."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machine import Number
from fourfold.planning.workload import SCHEDULES


def bubble_seconds(
    schedule: Number, pp: Number, interleave: Number, forward: Number, inputs: Number, weights: Number
) -> Number:
    """What a rank waits in a step for the pipeline to fill and drain. forward, inputs, weights: seconds of one
    micro-batch in all of the rank's layers, and of its gradients of inputs and of weights.

    1F1B and GPipe (p − 1)(F + I + W); interleaved 1/v of it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    Zero-bubble schedules put weight gradients into the gap (Qi et al. 2024, arXiv 2401.10241, table 2: F + I − W, at
    least I), and the V-shaped are without one where all three take as long in half a share; of DualPipeV this is the
    most. As torch's lists run: tests/planning/test_terms.py.
    """
    excess = np.maximum(inputs - weights, 0.0)
    zero_bubble = np.maximum(forward + inputs - weights, inputs) / interleave
    v_shaped = np.maximum(np.maximum(forward, inputs), weights) / 2
    dual = (forward + 2 * excess) / 2
    whole = (forward + inputs + weights) / interleave
    is_one = [np.equal(schedule, SCHEDULES.index(name)) for name in
              ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")]  # fmt: skip
    return (pp - 1) * np.select(is_one, [zero_bubble, v_shaped, dual], whole)


def transfer_seconds(size: Number, stride: Number, gpus: Number, bandwidth_in: Number, bandwidth_out: Number,
                     latency: Number, gpus_per_node: Number) -> Number:  # fmt: skip
    """Of ``size`` bytes to the next stage, ``stride`` ranks further."""
    inside = stride < gpus_per_node
    return size / np.where(inside, bandwidth_in, bandwidth_out) + latency
