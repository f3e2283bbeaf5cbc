"""Compute the peak memory of each pipeline rank by category."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.block_memory import BlockBytes, block_bytes, is_replicated, is_resharded, peak_bytes
from fourfold.planning.cost.embedding_sums import with_embedding
from fourfold.planning.cost.expert_sizes import (
    dense_share,
    experts_of_one_shard,
    has_dense_first,
    has_experts,
    has_own_shards,
    kinds_of_blocks,
    states_of_experts,
)
from fourfold.planning.cost.optimizer_cost import (
    AVERAGE_BYTES,
    entries_without_second_moment,
    lion_workspace,
    muon_workspace,
)
from fourfold.planning.cost.out_of_memory import CACHED, runtime_bytes
from fourfold.planning.cost.stage_split import Blocks, blocks_of, in_flight, split_of
from fourfold.planning.machines.machine import Machine
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.workload import Workload

CATEGORIES = ("parameters", "gradients", "optimizer", "weights", "activations", "logits", "reserve")
"""Categories of a rank's memory. All of them are counted at the same moment, when the most memory is in use.

- gradients: 0 if that moment is before the backward pass of a step with one micro-batch.
- weights: gathered weights, or 16-bit copies.
- logits: how much the head and the loss raise the peak above the activations.
- reserve: the runtime, communication buffers, and unused memory that the allocator holds.
"""


def stage_memory(work: Workload, machine: Machine, rank: int) -> dict[str, Number]:
    """Return the peak bytes on one device of a pipeline rank (the first is 0), by ``CATEGORIES``."""
    blocks, block = blocks_of(work)[rank], block_bytes(work)
    *weights, both, reserve = _held(work, machine, rank, blocks, block)
    activations = peak_bytes(_with_blocks(work, blocks, block), blocks.number, in_flight(work, rank), False, block)
    activations = np.minimum(activations, both)
    values = (*weights, activations, both - activations, reserve)
    return dict(zip(CATEGORIES, values, strict=True))


def _with_blocks(work: Workload, blocks: Blocks, block: BlockBytes) -> Workload:
    """Return the workload with the fractions of blocks with experts and with linear attention that this pipeline rank
    has."""
    if block.linear is not None:
        work = work.but(linear=blocks.linear / blocks.number, after_linear=blocks.after_linear)
    if block.dense is None:
        return work
    return work.but(sparse=np.where(np.asarray(work.model.num_experts) > 0, 1 - blocks.dense / blocks.number, 0.0))


class Tables(NamedTuple):
    """Number of weight entries of embeddings and head on a pipeline rank, before they are split over x and y.

    - every: all of them. A weight that embedding and head share counts once.
    - embedding, head: the token embedding and the head. 0 if the rank does not have it.
    - own_head: the head, or 0 if it shares the embedding's weight.
    """

    every: Number
    embedding: Number
    head: Number
    own_head: Number


def _held(work: Workload, machine: Machine, rank: Number, blocks: Blocks, block: BlockBytes) -> tuple[Number, ...]:
    """Return the peak bytes by ``CATEGORIES``, with activations and logits as one sum."""
    layers, work = blocks.number, _with_blocks(work, blocks, block)
    model, layout, program = work.model, work.layout, work.program
    first, last = np.equal(rank, 0), np.equal(rank, layout.pp - 1)
    last = np.where(layout.v_shaped & (layout.pp > 1), first, last)
    table = model.padded_vocab_size * model.hidden_size
    is_shared = first & np.asarray(model.tie_word_embeddings, bool) & (layout.pp == 1)
    of_embedding, of_head = np.where(first, table, 0), np.where(last, table, 0)
    own_head = np.where(is_shared, 0, of_head)
    every_table = of_embedding + np.where(first, model.positions * model.hidden_size, 0) + own_head
    tables = Tables(every_table, of_embedding, of_head, own_head)
    parameters, gradients, optimizer, copied = _states(work, layers, every_table)
    if has_experts(work):
        of_experts = _states(states_of_experts(work), layers, 0)
        parameters, gradients, optimizer, copied = (
            every + own for every, own in zip((parameters, gradients, optimizer, copied), of_experts, strict=True)
        )
    higher = np.where(last, block.head - block.in_backward(work, layers), -np.inf)
    weights = _weights(work, layers, tables, block, higher)
    activations = peak_bytes(work, layers, in_flight(work, rank), last, block)
    of_block = weights - _weights_in_block(work, layers, tables, block, np.inf)
    held, entries = (activations, gradients, weights, of_block), of_embedding / (layout.x * layout.y)
    activations = with_embedding(work, rank, layers, block, held, entries)
    of_table = np.maximum(tables.embedding, tables.head)
    copied = copied + muon_workspace(work, layers) + lion_workspace(work, layers, of_table)
    left = _weights_left_at_the_end(work, layers, tables, block, weights)
    # Gathered weights that are freed after use are not in memory when the optimizer makes its copies.
    copied = copied - np.where(is_resharded(work), left, 0)
    at_end, activations = _at_the_peak(work, gradients, activations, copied, weights, left, tables, block)
    # The optimizer makes its copies (gradients, Muon's matrices, Lion's updates) after all activations are freed.
    gradients = np.where(at_end, gradients, 0)
    weights = np.where(at_end, left, weights)
    optimizer = optimizer + np.where(at_end, np.maximum(copied - activations, 0), 0)
    gradients, optimizer = (np.where(program.offloads_optimizer, 0, size) for size in (gradients, optimizer))
    allocated = parameters + gradients + optimizer + weights + activations
    reserve = np.where(program.count_runtime, runtime_bytes(work, machine), 0) + CACHED * allocated
    return parameters, gradients, optimizer, weights, activations, reserve


def _at_the_peak(
    work: Workload,
    gradients: Number,
    activations: Number,
    copied: Number,
    weights: Number,
    left: Number,
    tables: Tables,
    block: BlockBytes,
) -> tuple[Flag, Number]:
    """Return whether all gradients exist at the moment of peak memory, and the bytes of activations at that moment.

    In a step with one micro-batch, the backward pass allocates gradients while it frees activations and gathered
    weights. So the peak is at the start or at the end of the backward pass. With several micro-batches, or if gradients
    have their own buffers, all gradients already exist at the start.

    Args:
        gradients: Bytes of all gradients.
        activations: Bytes of activations when the backward pass begins.
        copied: Bytes of the copies that the optimizer makes.
        weights: Bytes of gathered weights when the backward pass begins.
        left: Bytes of gathered weights in the backward pass of the rank's first block.
    """
    gradual = _is_gradual(work)
    if not np.any(gradual):
        return np.True_, activations
    if has_experts(work):  # The gradients include the sums for the first block's experts, which do not exist yet.
        block = block.without_sums(experts_of_one_shard(work, work.step.reduce_bytes))
    end = peak_bytes(_first_block(work), 1, 1, False, block)
    step, ranks = work.step, work.layout.x * work.layout.y
    embedding, head = tables.embedding / ranks, tables.head / ranks
    # The next three lines apply only if gathered weights are freed after use. In the first block's backward pass, the
    # head's weight is not in memory, although ``left`` counts it. The embedding's gradient does not exist yet, although
    # ``gradients`` counts it. Later, while the embedding's gradient is summed, no gathered weights and no activations
    # are in memory.
    summed = (step.item_bytes + step.reduce_bytes) * embedding - left
    later = step.reduce_bytes * embedding / work.layout.shards
    resharded = np.maximum(end - step.item_bytes * head - later, summed)
    end = np.where(is_resharded(work), resharded, end + step.item_bytes * embedding)
    at_end = ~gradual | (gradients + np.maximum(end, copied) + left > activations + weights)
    return at_end, np.where(gradual & at_end, end, activations)


def _is_gradual(work: Workload) -> Flag:
    """Return whether gradients are allocated one by one during the backward pass."""
    gradual: Flag = (np.asarray(work.micro_batches) == 1) & ~np.asarray(work.program.half_weights, bool)
    return gradual


def _weights_left_at_the_end(
    work: Workload, layers: Number, tables: Tables, block: BlockBytes, weights: Number
) -> Number:
    """Return the bytes of gathered weights in the backward pass of the rank's first block.

    There are fewer gathered weights than at the start of the backward pass (``weights``) only if the step has one
    micro-batch. Then the backward pass has already freed the weights that were gathered once, and the head's buffer.
    """
    if not np.any(_is_gradual(work)):
        return weights
    first = _first_block(work)
    freed = _freed_entries(work, layers * work.block_weights - first.block_weights)
    # FSDP2 frees its copies of experts even if no other rank shards them.
    if has_experts(work):
        entries = layers * work.model.expert_weights - first.model.expert_weights
        freed = freed + _freed_entries(states_of_experts(work), entries)
    in_block = _weights(work, layers, tables, block, -np.inf)
    return np.where(_is_gradual(work), in_block - np.where(work.layout.shards > 1, freed, 0), weights)


def _first_block(work: Workload) -> Workload:
    """Return a workload whose blocks are all like the rank's first block. The first block has a dense MLP if any block
    of the rank has one."""
    if not has_dense_first(work):
        return work
    return work.but(sparse=np.where(dense_share(work) > 0, 0.0, work.model.sparse))


def _freed_entries(work: Workload, entries: Number) -> Number:
    return np.where(is_resharded(work), 0, work.step.item_bytes * entries / (work.layout.x * work.layout.y))


def _states(work: Workload, layers: Number, tables: Number) -> tuple[Number, ...]:
    """Return the bytes of parameters, of gradients, of optimizer states, and of the copies of gradients that the
    optimizer makes.

    The four numbers cover all weights except experts. The rank has ``layers`` blocks. ``tables`` is the number of
    weight entries in the rank's embedding and head, before x and y split them.
    """
    layout, step, program = work.layout, work.step, work.program
    entries = (layers * work.block_weights + tables) / (layout.x * layout.y)
    copies, shards, item = layout.dp * layout.cp, layout.shards, step.item_bytes
    # fourfold and FSDP store shards of weights, usually in fp32, and gather 16-bit weights. Other frameworks store
    # 16-bit weights.
    parameters = np.where(
        program.half_weights,
        item * entries / np.where(layout.zero == 3, shards, layout.z),
        step.weight_bytes * entries / shards,
    )
    whole_gradients = np.where(program.gradient_bytes > 0, program.gradient_bytes, step.reduce_bytes) * entries
    # A summed gradient is cast to its weight's dtype. Count the larger of the two dtypes.
    complete = np.maximum(step.reduce_bytes, step.weight_bytes) * entries / shards
    is_whole = (layout.zero == 1) & (copies > 1) & (work.micro_batches > 1)
    gradients = np.where(is_whole, np.maximum(whole_gradients, complete), complete)
    in_half = whole_gradients / np.where(layout.zero >= 2, shards, layout.z)
    gradients = np.where(program.half_weights, in_half, gradients)
    # Replicated weights have gradients in ``reduce_dtype`` until the optimizer step. They are cast only after all
    # activations are freed.
    late = np.where(is_replicated(work) & program.is_fourfold, complete - step.reduce_bytes * entries, 0)
    single = entries_without_second_moment(work, layers, tables) / (layout.x * layout.y)
    # Frameworks with 16-bit weights also keep the weights in the optimizer's dtype, if it is larger.
    master = np.where(program.half_weights & (step.weight_bytes > item), step.weight_bytes * entries, 0)
    optimizer = master + step.moment_bytes * (2 * entries - single)
    optimizer = (optimizer + np.where(step.averaged, AVERAGE_BYTES * entries, 0)) / shards
    copied = late + np.where(program.gradient_copy, 4 * entries / shards, 0)
    return parameters, gradients - late, optimizer, copied


def _weights(work: Workload, layers: Number, tables: Tables, block: BlockBytes, higher: Number) -> Number:
    """Return the bytes of gathered weights or of 16-bit copies at the moment of peak memory.

    This moment is in the backward pass of a block, or in the head, whose activations need ``higher`` more bytes. In the
    head, fourfold has two copies of the head's own weight (the weight, and the buffer that received it), but no weights
    of blocks.
    """
    in_block = _weights_in_block(work, layers, tables, block, block.kept(work, 1) + np.maximum(higher, 0))
    both = 2 * work.step.item_bytes * tables.own_head / (work.layout.x * work.layout.y)
    both = both + _gathered_experts(work, layers, 0)
    most = np.maximum(in_block - np.maximum(higher, 0), both + np.minimum(higher, 0))
    is_copied = is_resharded(work) & (work.layout.shards > 1) & np.greater(tables.own_head, 0)
    return np.where(is_copied & np.asarray(work.program.is_fourfold, bool), most, in_block)


def _weights_in_block(work: Workload, layers: Number, tables: Tables, block: BlockBytes, freed: Number) -> Number:
    """Return the bytes of gathered weights or of 16-bit copies in the backward pass of a block. Include the block's
    unsharded gradients while they are summed, and subtract the bytes that the pass has ``freed`` by then."""
    gathered = np.minimum(1 + work.program.prefetch + work.parts_cross_blocks, layers)
    if block.dense is None:
        held = _gathered(work, layers, tables, work.model, work.model, gathered, 0)
        return held + np.maximum(_summed(work, work.model) - freed, 0)
    share, (dense, others) = dense_share(work), (kind.model for kind in kinds_of_blocks(work))
    most: Number = 0
    for one, other, number in ((dense, others, layers * share), (others, dense, layers * (1 - share))):
        several = np.minimum(gathered, number)
        held = _gathered(work, layers, tables, one, other, several, gathered - several)
        held = held + np.maximum(_summed(work, one) - freed, 0)
        most = np.maximum(most, np.where(number > 0, held, 0))
    return most


def _gathered(
    work: Workload, layers: Number, tables: Tables, one: ModelShape, other: ModelShape, ones: Number, others: Number
) -> Number:
    """Return the bytes of gathered weights for ``ones`` blocks of one kind and ``others`` blocks of a second kind."""
    weights = ones * replace(work, model=one).block_weights + others * replace(work, model=other).block_weights
    experts = ones * one.expert_weights + others * other.expert_weights
    return _gathered_entries(work, layers, tables, weights) + _gathered_experts(work, layers, experts)


def _gathered_experts(work: Workload, layers: Number, gathered: Number) -> Number:
    """Return the bytes of gathered experts. With ``zero`` 3, FSDP2 frees its copies of experts after use, even if no
    other rank shards them."""
    if not has_experts(work):
        return 0.0
    freed = has_own_shards(work) & (work.layout.zero == 3)
    return _gathered_entries(states_of_experts(work), layers, Tables(0, 0, 0, 0), gathered, freed)


def _gathered_entries(work: Workload, layers: Number, tables: Tables, gathered: Number, freed: Flag = False) -> Number:
    """Return the bytes of gathered weights: ``gathered`` entries of blocks, and embedding and head. Count them if
    several ranks shard the weights, or if the weights are ``freed`` after use.

    The backward pass does not gather the embedding, because the embedding's gradient does not depend on its weight. If
    weights are gathered once per step, the head is gathered last, and FSDP2 keeps its buffer until the next gather.
    """
    layout, step, program = work.layout, work.step, work.program
    item = np.where(program.autocast, step.weight_bytes, step.item_bytes) / (layout.x * layout.y)
    every = item * (layers * work.block_weights + tables.every)
    buffer = item * np.where(np.asarray(work.micro_batches) == 1, tables.own_head, 0)
    held = np.where(is_resharded(work), item * (gathered + tables.head), every + buffer)
    whole = np.where(program.half_weights | (step.weight_bytes == step.item_bytes), 0, every)
    return np.where((freed | (layout.shards > 1)) & ~np.asarray(program.half_weights, bool), held, whole)


def _summed(work: Workload, block: ModelShape) -> Number:
    """Return the bytes of a block's unsharded gradients while they are reduce-scattered."""
    held = _summed_entries(work, replace(work, model=block).block_weights)
    return held + _summed_entries(states_of_experts(work), block.expert_weights) if has_experts(work) else held


def _summed_entries(work: Workload, entries: Number) -> Number:
    layout = work.layout
    sums = is_resharded(work) & (work.layout.shards > 1) & ~np.asarray(work.program.half_weights, bool)
    return np.where(sums, work.step.reduce_bytes * entries / (layout.x * layout.y), 0)


def peak_memory(work: Workload, machine: Machine, block: BlockBytes | None = None) -> Number:
    """Return the peak bytes of the rank that needs the most memory. The first rank of a pipeline holds the most
    micro-batches, and the last rank has the head. A rank between them can have more blocks or more experts."""
    layout = work.layout
    block = block_bytes(work) if block is None else block
    # The run file sets the number of layers of each stage, so any rank may need the most memory.
    if layout.layers_per_stage is not None:
        return _fullest(work, machine, block, *enumerate(blocks_of(work)))
    split = split_of(work)
    peak = _fullest(work, machine, block, (0, split.first), (layout.pp - 1, split.last))
    for place, blocks in split.between:
        has_one = np.broadcast_to(np.greater(place, 0), np.shape(peak))
        # Few layouts have such a rank, so compute the memory only for these layouts.
        index = np.flatnonzero(has_one)
        rank, *numbers = (np.broadcast_to(part, has_one.shape).reshape(-1)[index] for part in (place, *blocks))
        between = _fullest(work.take(index), machine.take(index), block.take(index), (rank, Blocks(*numbers)))
        peak = np.array(peak)
        peak.reshape(-1)[index] = np.maximum(peak.reshape(-1)[index], between)
    return peak


def _fullest(work: Workload, machine: Machine, block: BlockBytes, *places: tuple[Number, Blocks]) -> Number:
    """Return the largest peak bytes among some pipeline ranks. Each place is a rank and its blocks."""
    fullest: Number = np.max(
        [np.broadcast_arrays(sum(_held(work, machine, *place, block)), work.layout.pp)[0] for place in places], 0
    )
    return fullest
