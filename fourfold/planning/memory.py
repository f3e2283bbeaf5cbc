"""Bytes on the fullest rank of each pipeline stage, by what they are for, and how likely they do not fit."""

from __future__ import annotations

import math

import numpy as np

from fourfold.planning.activations import head_bytes, peak_bytes
from fourfold.planning.machine import Machine, Number
from fourfold.planning.workload import Workload

CATEGORIES = ("parameters", "gradients", "optimizer", "weights", "activations", "logits", "reserve")
"""weights: gathered for use, or 16-bit copies; logits: what head and loss need besides the activations; reserve: the
runtime's own, communication buffers, and what the allocator holds but cannot use."""

FRAGMENTATION_PRIOR = (0.06, 0.05)
"""Of what a step allocates, and its spread: PyTorch's caching allocator rounds blocks up and cannot join all that are
free, and libraries have work spaces (Megatron-LM's own estimate adds 5 %)."""
FRAGMENTATION = 0.13
"""The same, fitted to the memory rows of the tenth that the other constants are fitted to."""
COMMUNICATOR = 0.5e9
"""Of one group: NCCL's channels with 4 to 8 MB for each of a few protocols and peers, in both directions."""
SPREAD = 0.07
"""Standard deviation of measured over predicted bytes: kernels' work spaces, library versions, fragmentation."""


def in_flight(work: Workload, stage: Number) -> Number:
    """Micro-batches whose activations stage 0, 1, … holds at once under 1F1B, in units of its whole share of layers.

    Interleaved: (v − 1)·p + 2(p − stage) − 1 chunks of 1/v of the layers (Narayanan et al. 2021, arXiv 2104.04473).
    """
    plain = work.pp - stage
    chunks = (work.interleave - 1) * work.pp + 2 * plain - 1
    held = np.where(work.interleave > 1, np.maximum(chunks / work.interleave, 1), plain)
    return np.minimum(np.where(work.pp > 1, held, 1), work.micro_batches)


def stage_memory(work: Workload, machine: Machine, stage: Number) -> dict[str, Number]:
    """Bytes by ``CATEGORIES`` on one rank of a pipeline stage, counted from 0."""
    first, last = np.equal(stage, 0), np.equal(stage, work.pp - 1)
    layers = np.where(first | last, work.end_layers, work.stage_layers)
    table = work.vocab * work.hidden
    tables = np.where(first, table + work.positions * work.hidden, 0) + np.where(
        last & ~(first & np.asarray(work.tied, bool)), table, 0
    )
    entries = (layers * work.block_weights + tables) / (work.x * work.y)
    copies = work.dp * work.cp
    sharded = work.zero > 0
    shards = work.z * np.where(sharded, copies, 1)
    item = work.bytes

    # fourfold and FSDP store fp32 shards and gather 16-bit weights; the others store 16-bit weights whole.
    parameters = np.where(
        work.half_weights, item * entries / np.where(work.zero == 3, shards, work.z), 4 * entries / shards
    )
    whole_gradients = np.where(work.stored_gradients > 0, work.stored_gradients, work.reduce_bytes) * entries
    gradients = np.where(
        work.half_weights,
        whole_gradients / np.where(work.zero >= 2, shards, work.z),
        np.where(
            (work.zero == 1) & (copies > 1), np.maximum(whole_gradients, 4 * entries / shards), 4 * entries / shards
        ),
    )
    copy = np.where(work.gradient_copy, 4, 0)
    optimizer = (np.where(work.half_weights, 12, 8) + copy) * entries / shards
    gathered_blocks = np.minimum(1 + work.prefetch, layers)
    resharded = (work.z > 1) | (work.zero == 3)
    gathered = item * (np.where(resharded, gathered_blocks * work.block_weights / (work.x * work.y), entries)
                       + np.where(resharded, tables / (work.x * work.y), 0))  # fmt: skip
    # One block's whole gradients on their way to being summed.
    gathered = gathered + np.where(resharded, work.reduce_bytes * work.block_weights / (work.x * work.y), 0)
    weights = np.where((shards > 1) & ~np.asarray(work.half_weights, bool), gathered,
                       np.where(work.half_weights | (work.bits == 32), 0, item * entries))  # fmt: skip
    both = peak_bytes(work, layers, in_flight(work, stage), last)
    without = peak_bytes(work, layers, in_flight(work, stage), False)
    activations = without
    logits = np.maximum(both - without, 0)
    allocated = parameters + gradients + optimizer + weights + both
    groups = sum(np.where(size > 1, 1, 0) for size in (work.x, work.y, work.z, work.dp, work.cp)) + 2 * (work.pp > 1)
    runtime = np.where(work.count_runtime, machine.reserved + COMMUNICATOR * groups, 0)
    reserve = runtime + FRAGMENTATION * allocated
    values = (parameters, gradients, optimizer, weights, activations, logits, reserve)
    return dict(zip(CATEGORIES, values, strict=True))


def peak_memory(work: Workload, machine: Machine) -> Number:
    """Bytes of the fullest rank: of the first stage, which holds most micro-batches, or the last, with the head; or of
    the second, where the ends have fewer blocks."""
    stages = [np.zeros(()), work.pp - 1]
    if np.any(work.balanced_ends):
        stages.append(np.minimum(1, work.pp - 1))
    return np.max(
        [np.broadcast_arrays(sum(stage_memory(work, machine, s).values()), work.pp)[0] for s in stages], axis=0
    )


def p_out_of_memory(predicted: Number, capacity: Number) -> Number:
    """Probability that a prediction of ``predicted`` bytes does not fit: log-normal around it."""
    deviation = (np.log(capacity) - np.log(predicted)) / SPREAD
    return 0.5 * (1 - _erf(deviation / math.sqrt(2)))


def _erf(x: Number) -> Number:
    """Abramowitz & Stegun 7.1.26, to 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.sign(x) * (1 - series * np.exp(-x * x))


__all__ = ["CATEGORIES", "head_bytes", "in_flight", "p_out_of_memory", "peak_memory", "stage_memory"]
