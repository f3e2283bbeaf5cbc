"""Seconds of a step, split into what they are spent on."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number
from fourfold.planning.cost.activations import is_replicated
from fourfold.planning.cost.block import BlockTime, block_time
from fourfold.planning.cost.stage_split import split_of
from fourfold.planning.cost.terms.bubble import bubble_seconds, transfer_seconds
from fourfold.planning.cost.terms.collective import Group, gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.host import OPTIMIZER_KERNELS, overlapped
from fourfold.planning.cost.terms.offload import offload_seconds
from fourfold.planning.cost.terms.optimizer_step import optimizer_seconds
from fourfold.planning.cost.terms.weight_traffic import added_bytes, copied_bytes
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, Workload

PARTS = (
    "compute", "recompute", "x", "y", "z", "cp", "dp", "pp", "bubble", "logits", "launch", "optimizer", "other",
)  # fmt: skip
"""What a step is spent on; x, y, z, cp and dp: exposed communication. Traffic of sharded weights over z · dp · cp ranks
is charged to z as far as z alone would take so long, and to dp beyond."""


def step_parts(
    work: Workload, machine: Machine, constants: Constants, block: BlockTime | None = None
) -> dict[str, Number]:
    """Seconds of each of ``PARTS``; their sum is the step. ``block``: when it is known already."""
    model, layout, program = work.model, work.layout, work.program
    block = block_time(work, machine, constants) if block is None else block
    exposed = constants.exposed
    full, selective = layout.recompute == 2, layout.recompute == 1

    # One block, one micro-batch.
    selected = np.where(program.recomputes_attention, block.attention_forward, 0.0)
    selected = selected + np.where(program.recomputes_mlp, block.activation_forward, 0.0)
    selected = np.where(program.recomputes_per_op, (block.forward - block.attention_forward) / 2, selected)
    whole = block.forward - np.where(program.recompute_stops_early, block.last_product, 0.0)
    recompute = np.where(full, whole, np.where(selective, selected, 0.0)) * layout.recomputing
    again = np.where(full, layout.recomputing, 0.0)
    gathers = np.where(selective & program.recomputes_gathers, layout.recomputing, 0.0)
    x_whole = block.x_forward - np.where(program.recompute_stops_early, block.last_sum, 0.0)
    x = block.x_forward + again * x_whole + gathers * block.x_again + block.x_backward
    y = block.y_forward * (1 + again) + gathers * block.y_again + block.y_backward
    # Weight gradients that are computed apart are not there to hide anything.
    overlap = np.asarray(program.overlap_x, bool) & ~layout.split_backward
    hideable_x, hideable_y = block.hideable_x + gathers * block.x_again, block.hideable_y + gathers * block.y_again
    hidden_x = np.where(overlap, _hidden(hideable_x, block.weight_gradients / 2, exposed), 0.0)
    hidden_y = np.where(overlap, _hidden(hideable_y, block.weight_gradients / 2, exposed), 0.0)
    ahead = _hidden(block.x_forward, (block.forward - block.attention_forward) / 2, exposed)
    hidden_x = hidden_x + np.where(program.overlap_forward, ahead * (1 + again), 0.0)
    gate = _hidden(block.gate_sum, block.up_product, exposed)
    hidden_y = hidden_y + np.where(program.gate_first, gate * (1 + again), 0.0)
    x, y = x - hidden_x, y - hidden_y
    cp = _over_cp(work, machine, constants, block)
    bandwidth = constants.memory * machine.memory_bandwidth
    moved = _moved_for_a_weight(work) / (layout.x * layout.y) / bandwidth
    compute = block.forward + block.backward + model.block_weights * moved
    offload = np.where(full & layout.offload, offload_seconds(work, machine), 0.0)
    device = compute + recompute + x + y + cp + offload
    host = block.launch_forward * (1 + again) + block.launch_backward
    launch = np.where(program.blocking, host, overlapped(device, host) - device)
    z = _exposed_z(work, constants, _over_z(work, machine, constants, model.block_weights, 2), device + launch)

    # One rank, one micro-batch; the last has the head, the first the embedding, and all wait for the slowest.
    split, micro_batches = split_of(work), work.micro_batches
    mean_layers = model.layers / layout.pp
    table = model.vocab * model.hidden * moved
    z_table = _over_z(work, machine, constants, model.vocab * model.hidden, 1)
    z_head = _exposed_z(work, constants, z_table, block.head)
    z_embedding = np.where(np.asarray(model.tied, bool) & (layout.pp == 1), 0.0, z_table)  # nothing runs beside it
    head, embedding = block.head + table + block.head_x + block.head_y + z_head, block.embedding + table + z_embedding
    several, v_shaped = layout.pp > 1, layout.v_shaped
    block_seconds = device + launch + z
    at_the_end = np.where(v_shaped, 0.0, head + np.where(several, 0.0, embedding))
    at_the_start = np.where(v_shaped, head, 0.0)
    slowest = np.maximum(split.most * block_seconds, split.last * block_seconds + at_the_end)
    slowest = np.maximum(slowest, split.first * block_seconds + at_the_start)
    # A slower rank is waited for in the steady state, and shows as bubble.
    waiting = np.where(several, micro_batches * (slowest - mean_layers * block_seconds - head / layout.pp), 0.0)
    ends = (head + embedding) / layout.pp
    weights = mean_layers * block.weight_gradients + block.head / (3 * layout.pp)
    forward = mean_layers * (block.forward + block.x_forward + block.y_forward + launch / 3) + ends / 3
    rest = mean_layers * block_seconds + ends - forward - weights
    bubble = bubble_seconds(layout.schedule, layout.pp, layout.interleave, micro_batches, forward, rest, weights)
    bubble = bubble + waiting
    pp = _over_pp(work, machine, constants)
    # Of the head, like of the layers, a stage's share on average counts as its own: the rest is waiting.
    scale, heads = micro_batches * mean_layers, micro_batches / layout.pp
    dispersion = 1 + constants.dispersion * slowest_of(layout.gpus / machine.gpus_per_node)
    dp = _over_dp(work, machine, constants, scale * (block.backward + recompute) / micro_batches)
    held = model.layers * model.block_weights / layout.pp + work.table_weights
    stepped = held / (layout.x * layout.y * layout.z * np.where(layout.zero > 0, layout.dp * layout.cp, 1))
    optimizer = optimizer_seconds(stepped, bandwidth)
    optimizer = optimizer + OPTIMIZER_KERNELS * constants.launch * machine.launch
    # Of weight traffic over z · dp ranks, z is charged what it takes over z alone, and dp what its ranks add.
    z_block, z_tables = scale * z, heads * (z_head + np.where(several, 0.0, z_embedding))
    over_z = z_block * _share_of_z(work, machine, constants, 2) + z_tables * _share_of_z(work, machine, constants, 1)
    parts = {
        "compute": scale * compute * dispersion,
        "recompute": scale * (recompute * dispersion + offload),
        "x": scale * x + heads * block.head_x,
        "y": scale * y + heads * block.head_y,
        "z": over_z,
        "cp": scale * cp,
        "dp": dp + (z_block + z_tables - over_z),
        "pp": pp,
        "bubble": bubble,
        "logits": heads * (block.head + table + np.where(several, 0.0, block.embedding + table)) * dispersion,
        "launch": scale * launch,
        "optimizer": optimizer,
        "other": constants.step,
    }
    assert tuple(parts) == PARTS
    return parts


def slowest_of(nodes: Number) -> Number:
    """By how many standard deviations the slowest of some nodes is slower than their mean, for large numbers of them:
    √(2 ln n), the growth of the largest of n normal variables (Cramér 1946, section 28.6)."""
    return np.sqrt(2 * np.log(np.maximum(nodes, 1)))


def step_seconds(work: Workload, machine: Machine, constants: Constants, block: BlockTime | None = None) -> Number:
    """Seconds of a whole step."""
    return sum(step_parts(work, machine, constants, block).values())


def _hidden(communication: Number, computation: Number, exposed: Number) -> Number:
    """Seconds of communication that computation beside it hides."""
    return (1 - exposed) * np.minimum(communication, computation)


def _over_cp(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> Number:
    """Keys and values of all of the sequence, forward and backward, and their gradients home: gathered and scattered,
    or round a ring, behind the attention of the block before (gradients in fp32). Or heads are exchanged for tokens and
    back, before and after the attention, with nothing to hide behind."""
    model, layout, step = work.model, work.layout, work.step
    group = group_of(layout.cp, layout.x * layout.y * layout.z, machine, constants)
    token = layout.micro_batch * step.seq / (layout.x * layout.y)
    again = (layout.recompute == 2) | ((layout.recompute == 1) & work.program.recomputes_attention)
    pair, forwards = step.item_bytes * token * 2 * model.keys, 2 + np.where(again, layout.recomputing, 0.0)
    ring = layout.cp_method == CP_METHODS.index("ring")
    home = np.where(ring, 4 / step.item_bytes * layout.cp / np.maximum(layout.cp - 1, 1), 1.0)
    sending = gather_seconds((forwards + home) * pair, forwards + 1, group)
    passed = sending - _hidden(sending, block.attention_forward * 2, constants.exposed)
    heads = step.item_bytes * token / layout.cp * (2 * model.queries + 2 * model.keys)
    exchanged = gather_seconds(forwards * heads, 2 * forwards, group)
    return np.where(layout.cp_method == CP_METHODS.index("ulysses"), exchanged, passed)


def _over_z(work: Workload, machine: Machine, constants: Constants, weights: Number, gathers: int) -> Number:
    """Some weights gathered for the forward and, where ``gathers`` is 2, again for the backward, and their gradients
    scattered."""
    layout, step = work.layout, work.step
    item, weights = step.item_bytes, weights / (layout.x * layout.y)
    tensor = layout.x * layout.y
    all_of_dp = layout.dp * layout.cp
    z_group = group_of(layout.z, tensor, machine, constants)
    wide = group_of(layout.z * all_of_dp, tensor, machine, constants)
    three, sharded = layout.zero == 3, (layout.zero > 0) & (layout.zero < 3)
    each = np.where(_kept_for_the_step(work), 0.0, 1.0)

    def gathered_and_scattered(group: Group) -> Number:
        return gather_seconds(gathers * item * weights, gathers, group) + gather_seconds(
            step.reduce_bytes * weights, 1, group
        )

    again = gather_seconds((gathers - 1) * item * weights, gathers - 1, z_group)
    scattered = np.where(layout.zero == 2, 1.0, 0.0)
    z_sharded = each * (gather_seconds(item * weights, 1, wide) + again)
    z_sharded = z_sharded + scattered * gather_seconds(step.reduce_bytes * weights, 1, wide)
    return np.where(three, gathered_and_scattered(wide),
                    np.where(sharded, z_sharded, gathered_and_scattered(z_group)))  # fmt: skip


def _share_of_z(work: Workload, machine: Machine, constants: Constants, gathers: int) -> Number:
    """Share of the seconds of ``_over_z`` that the same weights would take with one rank of dp and cp."""
    weights = work.model.block_weights if gathers == 2 else work.model.vocab * work.model.hidden
    all_ranks = _over_z(work, machine, constants, weights, gathers)
    alone = _over_z(work.but(dp=1, cp=1), machine, constants, weights, gathers)
    return np.where(all_ranks > 0, np.minimum(alone / np.maximum(all_ranks, 1e-30), 1.0), 1.0)


def _exposed_z(work: Workload, constants: Constants, sending: Number, computing: Number) -> Number:
    """What of it no computation hides."""
    return sending - np.where(work.program.overlap_z, _hidden(sending, computing, constants.exposed), 0.0)


def _moved_for_a_weight(work: Workload) -> Number:
    """Bytes that a rank's memory moves in one micro-batch, on average, for each entry of its whole weights.

    Of gradients that a rank keeps whole the first is cast, or copied for the sum over ranks, and the others are added.
    """
    step, program = work.step, work.program
    item, reduced = step.item_bytes, step.reduce_bytes
    replicated, every = is_replicated(work), work.micro_batches
    kept = replicated | (work.layout.zero == 1)
    # Gradients in 16 bits that stay are cast for every micro-batch, and added to those in 32.
    cast_and_added = copied_bytes(item, 4) + added_bytes(4, 4)
    first = np.where(replicated & (item == reduced), 0, copied_bytes(item, reduced))
    added = np.where(program.fuses_accumulation, 0, (first + (every - 1) * added_bytes(item, reduced)) / every)
    added = np.where(program.gradient_bytes > 0, cast_and_added, added)
    summed = np.where(kept, added, copied_bytes(item, reduced))
    gathers = np.where(_kept_for_the_step(work) | replicated, 0, 2)
    return summed + gathers * copied_bytes(item, item)


def _kept_for_the_step(work: Workload) -> Number:
    """Whether sharded weights are gathered once a step: distributed optimizers, and zero 1 and 2 where z is 1."""
    layout = work.layout
    return work.program.weights_kept | ((layout.zero > 0) & (layout.zero < 3) & (layout.z == 1))


def _over_dp(work: Workload, machine: Machine, constants: Constants, last_backward: Number) -> Number:
    """Gradients over the ranks that hold copies, once a step; behind the last micro-batch's backward where overlapped.

    With a distributed optimizer (zero 1 whose weights are kept) gradients are scattered and weights gathered, which
    runs behind the next forward.
    """
    model, layout, step, program = work.model, work.layout, work.step, work.program
    weights = (model.layers / layout.pp * model.block_weights + work.table_weights) / (layout.x * layout.y)
    copies = layout.dp * layout.cp
    across = group_of(copies, layout.x * layout.y * layout.z, machine, constants)
    wide = group_of(copies * layout.z, layout.x * layout.y, machine, constants)
    reduced = reduce_seconds(step.reduce_bytes * weights / layout.z, 1, across)
    scattered = gather_seconds(step.reduce_bytes * weights, 1, wide)
    scattered = np.where(program.all_reduces_gradients, reduced, scattered)
    gathered = np.where(_kept_for_the_step(work), gather_seconds(step.item_bytes * weights, 1, wide), 0.0)
    sending = np.where(layout.zero == 0, reduced, np.where(layout.zero == 1, scattered + gathered, 0.0))
    sending = np.where(layout.zero == 2, gathered, sending)
    # Weight gradients that are computed apart come last, and their sums after all of them.
    overlap = np.asarray(program.overlap_dp, bool) & ~layout.split_backward
    return sending - np.where(overlap, _hidden(sending, last_backward, constants.exposed), 0.0)


def _over_pp(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Activations and their gradients between stages, for each micro-batch and chunk, and once a step the gradients of
    a table that the first and the last rank share."""
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
