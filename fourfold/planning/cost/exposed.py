"""Compute, for each axis, the seconds of communication that computation does not hide. Such seconds are *exposed*."""

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.block_time import BlockTime
from fourfold.planning.cost.expert_sizes import has_experts
from fourfold.planning.cost.exposed_batch_parts import exposed_batch_parts
from fourfold.planning.cost.linear_attention import has_linear, kinds_of_attention, mean_of_kinds
from fourfold.planning.cost.terms.bubble import transfer_seconds
from fourfold.planning.cost.terms.collective import gather_seconds, group_of, reduce_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, Workload


def hidden(communication: Number, computation: Number, exposed: Number) -> Number:
    """Return the seconds of ``communication`` that concurrent ``computation`` hides.

    Each second of computation could hide one second of communication. But the fraction ``exposed`` of the seconds that
    could be hidden is not hidden.
    """
    return (1 - exposed) * np.minimum(communication, computation)


def forwards_again(work: Workload) -> Number:
    """Return the fraction of the blocks whose forward pass full recompute repeats, or 0 without full recompute."""
    return np.where(work.layout.recompute == 2, work.layout.recomputing, 0.0)


def exposed_x_and_y(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> tuple[Number, Number]:
    """Return the exposed seconds of one block's collectives over the tensor axes: first over x, then over y. They
    include the collectives that recompute repeats."""
    layout, program, exposed = work.layout, work.program, constants.exposed
    again = forwards_again(work)
    gathers = np.where((layout.recompute == 1) & program.recomputes_gathers, layout.recomputing, 0.0)
    x_whole = block.x_forward - np.where(program.recompute_stops_early, block.last_sum, 0.0)
    x = block.x_forward + again * x_whole + gathers * block.x_again + block.x_backward
    norms = np.where((layout.recompute == 1) & program.recomputes_norms, layout.recomputing, 0.0)
    y = block.y_forward * (1 + again) + gathers * block.y_again + norms * block.norms_again + block.y_backward
    # If weight gradients are deferred, they are computed after the collectives of their block, so they cannot hide
    # these collectives.
    overlap = np.asarray(program.overlap_x, bool) & ~layout.split_backward
    hideable_x, hideable_y = block.hideable_x + gathers * block.x_again, block.hideable_y + gathers * block.y_again
    hidden_x = np.where(overlap, hidden(hideable_x, block.weight_gradients / 2, exposed), 0.0)
    hidden_y = np.where(overlap, hidden(hideable_y, block.weight_gradients / 2, exposed), 0.0)
    ahead = hidden(block.x_forward, (block.forward - block.attention_forward) / 2, exposed)
    hidden_x = hidden_x + np.where(program.overlap_forward, ahead * (1 + again), 0.0)
    # A block's backward pass begins with an all-gather of gradients. With full recompute, fourfold recomputes a dense
    # block during this all-gather, so most or all of the all-gather is hidden.
    first = hidden(block.x_backward / 4, block.forward, exposed)
    hidden_x = hidden_x + np.where(program.is_fourfold, again * first * (1 - work.model.sparse), 0.0)
    gate = hidden(block.gate_sum, block.up_matmul, exposed)
    hidden_y = hidden_y + np.where(program.gate_first, gate * (1 + again), 0.0)
    in_turn_x, in_turn_y = exposed_batch_parts(work, machine, constants)
    takes_turns = work.active_parts > 1
    return np.where(takes_turns, in_turn_x, x - hidden_x), np.where(takes_turns, in_turn_y, y - hidden_y)


def exposed_cp(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> Number:
    """Return the exposed seconds of communication over cp in one block, in forward and backward.

    The ranks use one of three methods (``CP_METHODS``). With "gathered", the ranks gather keys and values, and scatter
    the gradients. With a ring, the ranks pass keys and values around the ring, and in the backward pass also their
    gradients in fp32. Attention hides the transfers of these two methods. With Ulysses, one all-to-all before attention
    gives each rank all tokens of some heads, and another one returns the outputs. No computation hides these two
    exchanges. Linear attention always uses Ulysses, and repeats both exchanges in its recomputation.
    """
    if not has_linear(work):
        return _cp_of_softmax(work, machine, constants, block)
    softmax, linear = kinds_of_attention(work)
    of_softmax = _cp_of_softmax(softmax, machine, constants, block)
    return mean_of_kinds(work, of_softmax, _cp_of_linear(linear, machine, constants))


def _cp_of_linear(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the seconds of the exchanges in blocks with linear attention. Outputs are exchanged in fp32."""
    model, layout, step = work.model, work.layout, work.step
    group = group_of(layout.cp, layout.x * layout.y * layout.z, machine, constants)
    one = step.item_bytes * (layout.micro_batch_size * step.seq_length / (layout.x * layout.y)) / layout.cp
    widths = model.queries * (1 + 4 / step.item_bytes) + 2 * model.keys
    return gather_seconds(one * 3 * widths, 6, group)


def _cp_of_softmax(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> Number:
    model, layout, step = work.model, work.layout, work.step
    group = group_of(layout.cp, layout.x * layout.y * layout.z, machine, constants)
    token = layout.micro_batch_size * step.seq_length / (layout.x * layout.y)
    again = (layout.recompute == 2) | ((layout.recompute == 1) & work.program.recomputes_attention)
    pair, forwards = step.item_bytes * token * 2 * model.keys, 2 + np.where(again, layout.recomputing, 0.0)
    ring = layout.cp_method == CP_METHODS.index("ring")
    home = np.where(ring, 4 / step.item_bytes * layout.cp / np.maximum(layout.cp - 1, 1), 1.0)
    sending = gather_seconds((forwards + home) * pair, forwards + 1, group)
    passed = sending - hidden(sending, block.attention_forward * 2, constants.exposed)
    one = step.item_bytes * token / layout.cp
    # If only the attention core is recomputed, its output is not exchanged again, because the backward pass does not
    # read the exchanged output.
    returns = 2 + np.where(layout.recompute == 2, layout.recomputing, 0.0)
    heads = forwards * (model.queries + 2 * model.keys) + returns * model.queries
    exchanged = gather_seconds(one * heads, forwards + returns, group)
    return np.where(layout.cp_method == CP_METHODS.index("ulysses"), exchanged, passed)


def exposed_ep(work: Workload, constants: Constants, block: BlockTime) -> Number:
    """Return the exposed seconds of one block's exchanges of tokens over ep, including the exchanges that recompute
    repeats.

    Nothing hides these exchanges, unless the framework runs the computation of another micro-batch at the same time
    (``overlap_ep``).
    """
    if not has_experts(work):
        return 0.0
    sent = block.experts.ep * (1 + forwards_again(work)) + block.experts.ep_backward
    beside = hidden(sent, block.forward + block.backward, constants.exposed)
    return sent - np.where(work.program.overlap_ep, beside, 0.0)


def exposed_z(work: Workload, constants: Constants, sending: Number, computing: Number) -> Number:
    """Return the exposed seconds of weight all-gathers and gradient reduce-scatters.

    Args:
        sending: Seconds of these collectives if nothing hides them.
        computing: Seconds of concurrent computation.
    """
    return sending - np.where(work.program.overlap_z, hidden(sending, computing, constants.exposed), 0.0)


def exposed_gradient_sum(work: Workload, constants: Constants, sending: Number, last_backward: Number) -> Number:
    """Return the exposed seconds of the gradient sum over data-parallel ranks, once per step.

    Args:
        sending: Seconds of the sum if nothing hides it.
        last_backward: Seconds of the last backward pass, which can hide the sum.
    """
    # If weight gradients are deferred to the end of the step, the sums start after the last weight gradient. No
    # computation is left to hide the sums.
    overlap = np.asarray(work.program.overlap_dp, bool) & ~work.layout.split_backward
    return sending - np.where(overlap, hidden(sending, last_backward, constants.exposed), 0.0)


def exposed_pp(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the exposed seconds of communication over pp.

    For each micro-batch, stages send activations and gradients to each other. If the first and the last rank both have
    a copy of the embedding, they also sum its gradients once per step. The last rank has a copy if the embedding is
    also the head, or if prediction layers read it.
    """
    model, layout, step = work.model, work.layout, work.step
    size = step.item_bytes * work.tokens * model.hidden_size / (layout.x * layout.y)
    one = transfer_seconds(size, layout.gpus, machine, constants)
    exposed = np.where(work.program.overlap_dp & (layout.stages_per_rank > 1), constants.exposed, 1.0)
    sent = 2 * work.micro_batches * layout.stages_per_rank * one * exposed
    table = step.reduce_bytes * model.padded_vocab_size * model.hidden_size / (layout.x * layout.y * layout.shards)
    shared = model.copies_embedding & ~layout.v_shaped
    ends = group_of(2, layout.gpus / layout.pp * np.maximum(layout.pp - 1, 1), machine, constants)
    return np.where(layout.pp > 1, sent + np.where(shared, reduce_seconds(table, 1, ends), 0.0), 0.0)
