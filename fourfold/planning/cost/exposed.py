"""Seconds of communication over cp, z, dp and pp that computation does not hide."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number
from fourfold.planning.cost.block import BlockTime
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts, where_experts
from fourfold.planning.cost.terms.bubble import transfer_seconds
from fourfold.planning.cost.terms.collective import (
    ShardGroup,
    gather_seconds,
    group_of,
    reduce_seconds,
    shard_group_of,
    shard_seconds,
)  # fmt: skip
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


def weight_traffic_seconds(
    work: Workload, machine: Machine, constants: Constants, weights: Number, gathers: int
) -> Number:
    """Seconds to gather ``weights`` for the forward and, where ``gathers`` is 2, again for the backward, and to scatter
    their gradients; nothing hidden."""
    layout, step = work.layout, work.step
    item, weights = step.item_bytes, weights / (layout.x * layout.y)
    tensor = layout.x * layout.y
    all_of_dp = layout.dp * layout.cp
    per_node = work.program.shards_per_node
    z_group = shard_group_of(layout.z, tensor, per_node, machine, constants)
    wide = shard_group_of(layout.z * all_of_dp, tensor, per_node, machine, constants)
    three, sharded = layout.zero == 3, (layout.zero > 0) & (layout.zero < 3)
    each = np.where(gathered_once_a_step(work), 0.0, 1.0)

    def gathered_and_scattered(group: ShardGroup) -> Number:
        scattered = np.where(work.program.scatter_bytes > 0, work.program.scatter_bytes, step.reduce_bytes)
        return shard_seconds(gathers * item * weights, gathers, group) + shard_seconds(scattered * weights, 1, group)

    again = shard_seconds((gathers - 1) * item * weights, gathers - 1, z_group)
    scattered = np.where(layout.zero == 2, 1.0, 0.0)
    z_sharded = each * (shard_seconds(item * weights, 1, wide) + again)
    z_sharded = z_sharded + scattered * shard_seconds(step.reduce_bytes * weights, 1, wide)
    return np.where(three, gathered_and_scattered(wide),
                    np.where(sharded, z_sharded, gathered_and_scattered(z_group)))  # fmt: skip


def share_of_z(work: Workload, machine: Machine, constants: Constants, gathers: int) -> Number:
    """Share of ``weight_traffic_seconds`` that remains with one rank of dp and cp."""
    weights = work.model.block_weights if gathers == 2 else work.model.vocab * work.model.hidden
    all_ranks = weight_traffic_seconds(work, machine, constants, weights, gathers)
    alone = weight_traffic_seconds(work.but(dp=1, cp=1), machine, constants, weights, gathers)
    return np.where(all_ranks > 0, np.minimum(alone / np.maximum(all_ranks, 1e-30), 1.0), 1.0)


def exposed_z(work: Workload, constants: Constants, sending: Number, computing: Number) -> Number:
    """Seconds of ``sending`` weights and gradients that ``computing`` beside it leaves exposed."""
    return sending - np.where(work.program.overlap_z, hidden(sending, computing, constants.exposed), 0.0)


def gathered_once_a_step(work: Workload) -> Number:
    """True where sharded weights are gathered once a step: distributed optimizers, and zero 1 and 2 where z is 1."""
    layout = work.layout
    return work.program.weights_kept | ((layout.zero > 0) & (layout.zero < 3) & (layout.z == 1))


def exposed_gradient_sum(work: Workload, machine: Machine, constants: Constants, last_backward: Number) -> Number:
    """Seconds of summing gradients over the ranks that hold copies, once a step, less what the last backward hides."""
    sending = _gradient_sum_seconds(work, machine, constants)
    if has_experts(work):
        of_experts = _gradient_sum_seconds(states_of_experts(work), machine, constants)
        sending = sending + where_experts(work, of_experts)
    # Weight gradients that are computed apart come last, and their sums after all of them.
    overlap = np.asarray(work.program.overlap_dp, bool) & ~work.layout.split_backward
    return sending - np.where(overlap, hidden(sending, last_backward, constants.exposed), 0.0)


def _gradient_sum_seconds(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Seconds of the sum of all gradients but those of experts, nothing hidden.

    With a distributed optimizer (zero 1 whose weights are kept) gradients are scattered, and weights gathered during
    the next forward.
    """
    model, layout, step, program = work.model, work.layout, work.step, work.program
    weights = (model.layers / layout.pp * model.block_weights + work.table_weights) / (layout.x * layout.y)
    copies = layout.dp * layout.cp
    across = group_of(copies, layout.x * layout.y * layout.z, machine, constants)
    wide = shard_group_of(copies * layout.z, layout.x * layout.y, program.shards_per_node, machine, constants)
    reduced = reduce_seconds(step.reduce_bytes * weights / layout.z, 1, across)
    scattered = shard_seconds(step.reduce_bytes * weights, 1, wide)
    scattered = np.where(program.all_reduces_gradients, reduced, scattered)
    gathered = np.where(gathered_once_a_step(work), shard_seconds(step.item_bytes * weights, 1, wide), 0.0)
    sending = np.where(layout.zero == 0, reduced, np.where(layout.zero == 1, scattered + gathered, 0.0))
    return np.where(layout.zero == 2, gathered, sending)


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
