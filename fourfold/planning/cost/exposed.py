"""Seconds of communication over cp, z, dp and pp that computation does not hide."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number
from fourfold.planning.cost.block import BlockTime
from fourfold.planning.cost.terms.bubble import transfer_seconds
from fourfold.planning.cost.terms.collective import gather_seconds, group_of, reduce_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, Workload


def hidden(communication: Number, computation: Number, exposed: Number) -> Number:
    """Seconds of communication that computation beside it hides."""
    return (1 - exposed) * np.minimum(communication, computation)


def exposed_cp(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> Number:
    """Seconds of cp in one block: keys and values of the whole sequence, forward and backward, and their gradients.

    They are gathered and scattered, or passed around a ring (gradients in fp32), hidden by the attention. Or heads are
    exchanged for tokens and back, before and after the attention, with nothing to hide them.
    """
    model, layout, step = work.model, work.layout, work.step
    group = group_of(layout.cp, layout.x * layout.y * layout.z, machine, constants)
    token = layout.micro_batch * step.seq / (layout.x * layout.y)
    again = (layout.recompute == 2) | ((layout.recompute == 1) & work.program.recomputes_attention)
    pair, forwards = step.item_bytes * token * 2 * model.keys, 2 + np.where(again, layout.recomputing, 0.0)
    ring = layout.cp_method == CP_METHODS.index("ring")
    home = np.where(ring, 4 / step.item_bytes * layout.cp / np.maximum(layout.cp - 1, 1), 1.0)
    sending = gather_seconds((forwards + home) * pair, forwards + 1, group)
    passed = sending - hidden(sending, block.attention_forward * 2, constants.exposed)
    one = step.item_bytes * token / layout.cp
    # Nothing in a recomputed core reads its output.
    returns = 2 + np.where(layout.recompute == 2, layout.recomputing, 0.0)
    heads = forwards * (model.queries + 2 * model.keys) + returns * model.queries
    exchanged = gather_seconds(one * heads, forwards + returns, group)
    return np.where(layout.cp_method == CP_METHODS.index("ulysses"), exchanged, passed)


def exposed_z(work: Workload, constants: Constants, sending: Number, computing: Number) -> Number:
    """Seconds of ``sending`` weights and gradients that ``computing`` beside it leaves exposed."""
    return sending - np.where(work.program.overlap_z, hidden(sending, computing, constants.exposed), 0.0)


def exposed_gradient_sum(work: Workload, constants: Constants, sending: Number, last_backward: Number) -> Number:
    """Seconds of ``sending`` gradients to other ranks, once a step, that the last backward does not hide."""
    # Weight gradients that are computed apart come last, and their sums after all of them.
    overlap = np.asarray(work.program.overlap_dp, bool) & ~work.layout.split_backward
    return sending - np.where(overlap, hidden(sending, last_backward, constants.exposed), 0.0)


def exposed_pp(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Seconds of sending activations and their gradients between stages, for each micro-batch and chunk, and of
    summing, once a step, the gradients of a table that the first and the last rank share."""
    model, layout, step = work.model, work.layout, work.step
    size = step.item_bytes * work.tokens * model.hidden / (layout.x * layout.y)
    one = transfer_seconds(size, layout.gpus, machine, constants)
    exposed = np.where(work.program.overlap_dp & (layout.interleave > 1), constants.exposed, 1.0)
    sent = 2 * work.micro_batches * layout.interleave * one * exposed
    shards = layout.z * np.where(layout.zero > 0, layout.dp * layout.cp, 1)
    table = step.reduce_bytes * model.vocab * model.hidden / (layout.x * layout.y * shards)
    shared = np.asarray(model.tied, bool) & ~layout.v_shaped
    ends = group_of(2, layout.gpus / layout.pp * np.maximum(layout.pp - 1, 1), machine, constants)
    return np.where(layout.pp > 1, sent + np.where(shared, reduce_seconds(table, 1, ends), 0.0), 0.0)
