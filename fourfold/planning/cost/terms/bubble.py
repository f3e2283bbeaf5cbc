"""Compute the time that a pipeline costs: the bubble, and sending activations from stage to stage."""

from __future__ import annotations

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import SCHEDULES


def bubble_seconds(
    schedule: Number,
    pp: Number,
    stages_per_rank: Number,
    micro_batches: Number,
    forward: Number,
    inputs: Number,
    weights: Number,
) -> Number:
    """Return the seconds per step that a rank waits for the pipeline to fill and drain.

    forward, inputs, and weights are the seconds that one micro-batch takes in all layers of the rank, for the forward
    pass (F), the input gradients (I), and the weight gradients (W).

    With p = ``pp``, 1F1B and GPipe wait (p − 1)(F + I + W). Interleaved 1F1B, with v = ``stages_per_rank``, waits 1/v
    of that time (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). If there are fewer than p micro-batches, each
    missing micro-batch adds (v − 1)/v of a micro-batch's time. Zero-bubble schedules fill the gaps with weight
    gradients until no weight gradients are left (Qi et al. 2024, arXiv 2401.10241, table 2). For DualPipeV the result
    is an upper bound.

    With this bubble, a step takes as long as torch's list of operations (tests/planning/test_terms.py). In two cases,
    the two times differ by up to 3 % in the tests: ZBVZeroBubble, and zero-bubble schedules if F, I, and W do not take
    equally long.
    """
    missing = np.maximum(pp - micro_batches, 0)
    whole = forward + inputs + weights
    interleaved = (pp - 1 + (stages_per_rank - 1) * missing) * whole / stages_per_rank
    is_one = [np.equal(schedule, SCHEDULES.index(name)) for name in
              ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")]  # fmt: skip
    return np.select(
        is_one,
        [
            _zero_bubble(pp, stages_per_rank, micro_batches, missing, forward, inputs, weights),
            _v_shaped(pp, micro_batches, forward, inputs, weights),
            (pp - 1) * (forward + 2 * np.maximum(inputs - weights, 0.0)) / 2,
        ],
        interleaved,
    )


def _zero_bubble(
    pp: Number, stages_per_rank: Number, micro_batches: Number, missing: Number, forward: Number, inputs: Number,
    weights: Number,
) -> Number:  # fmt: skip
    """Return the bubble of the interleaved zero-bubble schedule.

    Each of the p − 1 gaps lasts 1/v of the largest of F + I − W, F, and I. If there are fewer than p micro-batches,
    part of the work of the missing micro-batches is added. The bubble is at least the time that the first micro-batch
    takes through all chunks and back, because all later micro-batches follow it.
    """
    gap = np.maximum(np.maximum(forward + inputs - weights, inputs), forward)
    missed = missing * ((stages_per_rank - 1) * forward + np.minimum(inputs, weights))
    filled = ((pp - 1) * gap + missed) / stages_per_rank
    way = pp * (forward + inputs) + ((micro_batches - 1) * (forward + inputs) + weights) / stages_per_rank
    return np.maximum(filled, way - micro_batches * (forward + inputs + weights))


def _v_shaped(pp: Number, micro_batches: Number, forward: Number, inputs: Number, weights: Number) -> Number:
    """Return the bubble of the V-shaped zero-bubble schedule.

    With 2·pp or more micro-batches, there are p − 1 gaps, each over half of a rank's layers. The longest of F, I, and
    W, or the differences between them, determine the length of a gap. With fewer micro-batches, the bubble is the time
    that no later micro-batch fills while the first micro-batch travels down the V and up again.
    """
    longest = np.maximum(np.maximum(forward, inputs), weights)
    steady = (pp - 1) * np.maximum(np.maximum(longest, 2 * (inputs - weights)), 2 * forward - weights)
    first = 2 * (pp - 1) * (forward + inputs)
    behind = (np.minimum(micro_batches, pp) - 1) * (forward + np.minimum(forward, inputs))
    later = 2 * weights * np.maximum(micro_batches - pp, 0)
    return np.maximum(steady, first - behind - later) / 2


def transfer_seconds(size: Number, gpus: Number, machine: Machine, constants: Constants) -> Number:
    """Return the seconds of sending activations to the next stage.

    The bytes are sent through the network, because the slowest hop sets the pace. If the whole job is inside one node
    or domain, they are sent through the links inside it.

    Args:
        size: Bytes to send.
        gpus: Number of GPUs of the job.
        machine: The machine.
        constants: The machine's constants.
    """
    inside = gpus <= np.maximum(machine.domain, machine.gpus_per_node)
    outside = constants.inter * machine.node / machine.gpus_per_node
    latency = machine.base + np.where(inside, machine.intra_hop, machine.inter_hop)
    return size / np.where(inside, constants.intra * machine.intra8, outside) + constants.latency * latency
