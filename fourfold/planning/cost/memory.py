"""Compute the peak memory of each pipeline rank by category."""

from functools import reduce

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.block_memory import BlockBytes, block_bytes
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts
from fourfold.planning.cost.gathered_weights import tables_of
from fourfold.planning.cost.moments import PeakMoments, gradient_bytes, moments_of
from fourfold.planning.cost.optimizer_cost import (
    AVERAGE_BYTES,
    entries_without_second_moment,
    lion_workspace,
    muon_workspace,
)
from fourfold.planning.cost.out_of_memory import cached_share, runtime_bytes
from fourfold.planning.cost.stage_split import Blocks, blocks_of, split_of
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

CATEGORIES = ("parameters", "gradients", "optimizer", "weights", "activations", "logits", "reserve")
"""Categories of a rank's memory. All categories are counted at the moment when the most memory is in use.

- parameters: stored weights.
- gradients: gradients of weights. 0 if memory peaks before the step's first gradient exists.
- optimizer: optimizer states. If memory peaks in the optimizer step, also what this step adds to the peak.
- weights: gathered weights, or 16-bit copies of weights.
- activations: what the forward passes saved, and what the current operation needs.
- logits: how much the head and the loss raise the peak above the activations. 0 if memory peaks elsewhere.
- reserve: the runtime, communication buffers, and unused memory that the allocator holds.
"""


def stage_memory(work: Workload, machine: Machine, rank: int) -> dict[str, Number]:
    """Return the peak bytes on one device of pipeline rank ``rank`` (numbered from 0), by category (``CATEGORIES``)."""
    parameters, optimizer, moments = _held(work, rank, blocks_of(work)[rank], block_bytes(work))
    peak = max((*moments.in_head, *moments.elsewhere), key=lambda moment: float(moment.total))
    activations = peak.activations
    if peak in moments.in_head:
        activations = np.minimum(activations, moments.elsewhere[0].activations)
    # In the optimizer step, activations are freed, but the optimizer makes copies. If this step needs more memory than
    # the peak before it, the difference counts as optimizer memory.
    optimizer = optimizer + np.maximum(moments.optimizer.total - peak.total, 0)
    held = (parameters, peak.gradients, optimizer, peak.weights, activations, peak.activations - activations)
    return dict(zip(CATEGORIES, (*held, _reserve(work, machine, sum(held))), strict=True))


def _reserve(work: Workload, machine: Machine, allocated: Number) -> Number:
    return np.where(work.program.count_runtime, runtime_bytes(work, machine), 0) + cached_share(work) * allocated


def _with_blocks(work: Workload, blocks: Blocks, block: BlockBytes) -> Workload:
    """Return a copy of the workload for a pipeline rank that has the given blocks. In the copy, the fraction of blocks
    with experts and the fraction of blocks with linear attention are the fractions on this rank."""
    if block.linear is not None:
        work = work.but(linear=blocks.linear / blocks.number, after_linear=blocks.after_linear)
    if block.dense is None:
        return work
    return work.but(sparse=np.where(np.asarray(work.model.num_experts) > 0, 1 - blocks.dense / blocks.number, 0.0))


def _held(work: Workload, rank: Number, blocks: Blocks, block: BlockBytes) -> tuple[Number, Number, PeakMoments]:
    """Return three values for one pipeline rank: the bytes of parameters, the bytes of optimizer states, and the
    moments at which memory may peak."""
    layers, work = blocks.number, _with_blocks(work, blocks, block)
    tables, ranks = tables_of(work, rank), work.layout.x * work.layout.y
    states = _states(work, layers, ranks * tables.every)
    if has_experts(work):
        of_experts = _states(states_of_experts(work), layers, 0)
        states = tuple(every + own for every, own in zip(states, of_experts, strict=True))
    parameters, gradients, complete, optimizer, copied = states
    largest = ranks * np.maximum(tables.embedding, tables.head)
    copied = copied + muon_workspace(work, layers) + lion_workspace(work, layers, largest)
    optimizer = np.where(work.program.offloads_optimizer, 0, optimizer)
    return parameters, optimizer, moments_of(work, rank, layers, block, tables, (gradients, complete), copied)


def _states(work: Workload, layers: Number, tables: Number) -> tuple[Number, ...]:
    """Return five numbers of bytes on a rank: parameters, gradients between two backward passes, gradients in the
    optimizer step, optimizer states, and copies of gradients that the optimizer makes.

    The numbers cover all weights except experts. The rank has ``layers`` blocks. ``tables`` is the number of weight
    entries in the rank's embedding and head, before x and y split these weights.
    """
    layout, step, program = work.layout, work.step, work.program
    entries = (layers * work.block_weights + tables) / (layout.x * layout.y)
    shards, item = layout.shards, step.item_bytes
    # fourfold and FSDP store shards of weights, usually in fp32, and gather 16-bit weights. Other frameworks store
    # 16-bit weights.
    parameters = np.where(
        program.half_weights,
        item * entries / np.where(layout.zero == 3, shards, layout.z),
        step.weight_bytes * entries / shards,
    )
    gradient, complete = gradient_bytes(work)
    single = entries_without_second_moment(work, layers, tables) / (layout.x * layout.y)
    # Frameworks that store 16-bit weights also store the weights in the optimizer's dtype, if this dtype is larger.
    master = np.where(program.half_weights & (step.weight_bytes > item), step.weight_bytes * entries, 0)
    optimizer = master + step.moment_bytes * (2 * entries - single)
    optimizer = (optimizer + np.where(step.averaged, AVERAGE_BYTES * entries, 0)) / shards
    copied = np.where(program.gradient_copy, 4 * entries / shards, 0)
    return parameters, gradient * entries, complete * entries, optimizer, copied


def peak_memory(work: Workload, machine: Machine, block: BlockBytes | None = None) -> Number:
    """Return the peak bytes of the pipeline rank that needs the most memory. This can be any rank: the first rank holds
    the most micro-batches, the last rank has the head, and a rank between them can have more blocks or more experts."""
    layout = work.layout
    block = block_bytes(work) if block is None else block
    # If the run file sets the number of layers of each stage, compute the memory of all ranks.
    if layout.layers_per_stage is not None:
        return _fullest(work, machine, block, *enumerate(blocks_of(work)))
    split = split_of(work)
    peak = _fullest(work, machine, block, (0, split.first), (layout.pp - 1, split.last))
    for place, blocks in split.between:
        has_one = np.broadcast_to(np.greater(place, 0), np.shape(peak))
        # Few layouts have a rank in this entry of ``between``, so compute the memory only for these layouts.
        index = np.flatnonzero(has_one)
        rank, *numbers = (np.broadcast_to(part, has_one.shape).reshape(-1)[index] for part in (place, *blocks))
        between = _fullest(work.take(index), machine.take(index), block.take(index), (rank, Blocks(*numbers)))
        peak = np.array(peak)
        peak.reshape(-1)[index] = np.maximum(peak.reshape(-1)[index], between)
    return peak


def _fullest(work: Workload, machine: Machine, block: BlockBytes, *places: tuple[Number, Blocks]) -> Number:
    """Return the largest peak bytes among some pipeline ranks. Each of ``places`` is a rank's number and the rank's
    blocks."""
    fullest: Number = np.max(
        [np.broadcast_arrays(_peak(work, machine, *place, block), work.layout.pp)[0] for place in places], 0
    )
    return fullest


def _peak(work: Workload, machine: Machine, rank: Number, blocks: Blocks, block: BlockBytes) -> Number:
    parameters, optimizer, moments = _held(work, rank, blocks, block)
    every = (*moments.in_head, *moments.elsewhere, moments.optimizer)
    allocated = parameters + optimizer + reduce(np.maximum, [moment.total for moment in every])
    return allocated + _reserve(work, machine, allocated)
