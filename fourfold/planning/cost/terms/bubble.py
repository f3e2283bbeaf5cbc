"""Compute the time that a pipeline adds: the bubble, and the transfers between stages."""

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
    """Return how many seconds per step a rank is idle while the pipeline fills and drains.

    ``forward`` (F), ``inputs`` (I), and ``weights`` (W) are the seconds of one micro-batch in all layers of the rank:
    for the forward pass, the input gradients, and the weight gradients. Let p be ``pp`` and v be ``stages_per_rank``.

    - 1F1B and GPipe: the bubble is (p − 1)(F + I + W).
    - Interleaved1F1B and LoopedBFS: the bubble is (p − 1)(F + I + W) / v (Narayanan et al. 2021, arXiv 2104.04473,
      section 2.2). If there are fewer than p micro-batches, each missing micro-batch adds (v − 1)/v · (F + I + W).
    - Zero-bubble schedules compute weight gradients during the bubble. The result is the part of the bubble that the
      weight gradients do not fill (Qi et al. 2024, arXiv 2401.10241, table 2).
    - DualPipeV: the result is an upper bound.

    tests/planning/test_terms.py compares step times with these bubbles to a simulation of torch's schedules. The step
    times differ by at most 3 % for ZBVZeroBubble, and for other zero-bubble schedules if F, I, and W are not equal. In
    all other tested cases, the step times are equal. (DualPipeV is tested only with 2p or more micro-batches.)
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
    """Return the bubble of the interleaved zero-bubble schedule. F, I, W, p, and v are as in ``bubble_seconds``.

    A rank is idle in p − 1 gaps. A gap lasts 1/v of the largest of F + I − W, F, and I. If there are fewer than p
    micro-batches, a part of the missing micro-batches' work is added.

    The first micro-batch goes through all stages and back, and the later micro-batches follow it. So a step takes at
    least the time of the first micro-batch, plus the time of the later micro-batches in one stage.
    """
    gap = np.maximum(np.maximum(forward + inputs - weights, inputs), forward)
    missed = missing * ((stages_per_rank - 1) * forward + np.minimum(inputs, weights))
    filled = ((pp - 1) * gap + missed) / stages_per_rank
    way = pp * (forward + inputs) + ((micro_batches - 1) * (forward + inputs) + weights) / stages_per_rank
    return np.maximum(filled, way - micro_batches * (forward + inputs + weights))


def _v_shaped(pp: Number, micro_batches: Number, forward: Number, inputs: Number, weights: Number) -> Number:
    """Return the bubble of the V-shaped zero-bubble schedule. F, I, W, and p are as in ``bubble_seconds``.

    With 2p or more micro-batches, a rank is idle in p − 1 gaps. The length of a gap depends on the longest of F, I, and
    W for half of the rank's layers, and on their differences. With fewer micro-batches, the bubble is the time that the
    first micro-batch takes to go down and up the V, minus the time that the rank spends on other micro-batches.
    """
    longest = np.maximum(np.maximum(forward, inputs), weights)
    steady = (pp - 1) * np.maximum(np.maximum(longest, 2 * (inputs - weights)), 2 * forward - weights)
    first = 2 * (pp - 1) * (forward + inputs)
    behind = (np.minimum(micro_batches, pp) - 1) * (forward + np.minimum(forward, inputs))
    later = 2 * weights * np.maximum(micro_batches - pp, 0)
    return np.maximum(steady, first - behind - later) / 2


def transfer_seconds(size: Number, gpus: Number, machine: Machine, constants: Constants) -> Number:
    """Return the seconds that a pipeline stage needs to send activations to the next stage.

    We assume that the transfer crosses the network, because the slowest hop sets the pace. If the job fits into one
    node or domain, the transfer uses the links inside it.

    Args:
        size: Bytes to send.
        gpus: Number of GPUs of the job.
        machine: Bandwidths and latencies of the machine's links.
        constants: How close transfers get to these bandwidths and latencies.
    """
    inside = gpus <= np.maximum(machine.domain, machine.gpus_per_node)
    outside = constants.inter * machine.node / machine.gpus_per_node
    latency = machine.base + np.where(inside, machine.intra_hop, machine.inter_hop)
    return size / np.where(inside, constants.intra * machine.intra8, outside) + constants.latency * latency
