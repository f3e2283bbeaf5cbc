"""List the moments of a step at which the memory of a rank may peak.

FSDP2 gathers the weights of a unit (a block, the experts of a block, the embedding, or the head), and sums its
gradients at the end of the unit's backward pass. For the sum, it copies the gradients to a buffer, and keeps this
buffer until it sums the gradients of the next unit.
"""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.block_memory import (
    BlockBytes,
    Gradients,
    kept_and_in_backward,
    kept_by_micro_batch,
)
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts
from fourfold.planning.cost.gathered_weights import (
    GatheredWeights,
    Tables,
    first_block,
    gathered_weights,
    inputs_and_kept_weights,
    is_freed_after_use,
    is_replicated,
    is_resharded,
    is_sharded,
    kept_weights,
    last_block,
)
from fourfold.planning.cost.predictions import kept_by_predictions, received_copy, with_predictions
from fourfold.planning.cost.stage_split import in_flight
from fourfold.planning.workload import Workload


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step, in addition to parameters and optimizer states.

    - gradients: gradients of earlier backward passes, and of units whose backward pass has ended.
    - weights: gathered weights, or 16-bit copies.
    - activations: what the forward passes saved, and what the current operation needs.
    """

    gradients: Number
    weights: Number
    activations: Number

    @property
    def total(self) -> Number:
        return self.gradients + self.weights + self.activations


class PeakMoments(NamedTuple):
    """The moments of a step at which memory may peak.

    - in_head: forward and backward pass of the head, and the sum of its gradients.
    - elsewhere: backward passes and sums of gradients of blocks and embedding. The first moment is the backward pass of
      the block that needs the most memory.
    - optimizer: the optimizer step, with the copies that it makes as ``activations``.
    """

    in_head: list[Moment]
    elsewhere: list[Moment]
    optimizer: Moment


def gradient_bytes(work: Workload) -> tuple[Number, Number]:
    """Return the bytes of gradients per entry of a rank's tile: between two backward passes, and in the optimizer step.

    A *tile* is the part of a weight that one rank computes with. x and y split a weight into tiles.
    """
    layout, step, program = work.layout, work.step, work.program
    shards = layout.shards
    whole = np.where(program.gradient_bytes > 0, program.gradient_bytes, step.reduce_bytes)
    is_whole = (layout.zero == 1) & (work.micro_batches > 1)
    # If the weights' dtype is larger, fourfold casts summed gradients to this dtype in the optimizer step. Other
    # frameworks cast them earlier.
    complete = np.maximum(step.reduce_bytes, step.weight_bytes) / shards
    summed = np.where(program.is_fourfold, step.reduce_bytes / shards, complete)
    size = np.where(is_whole, np.where(program.is_fourfold, whole, np.maximum(whole, complete)), summed)
    size = np.where(program.half_weights, whole / np.where(layout.zero >= 2, shards, layout.z), size)
    return size, np.where(program.half_weights, size, complete)


class RankMemory(NamedTuple):
    """The inputs from which all moments of a pipeline rank are computed. Sizes are in bytes.

    - work: the workload, with the kinds of blocks that the rank has.
    - layers, block: number of blocks on the rank, and the bytes of each block.
    - tables: numbers of weight entries in the rank's embeddings and head.
    - kept: activations that the rank saves for one micro-batch.
    - fixed: tensors that stay in memory during the whole step.
    - flying: number of micro-batches whose activations are in memory at the same time.
    - gradients: all gradients that the rank holds between two backward passes.
    - each: bytes per entry of these gradients.
    - is_first: whether memory peaks in the first backward pass, when no gradients exist yet.
    - earlier, begun: gradients and activations at the beginning of the backward pass that has the memory peak.
    - late: whether gradients are summed over ranks only in the step's last backward pass.
    - sums: bytes of weight gradients during the backward pass of the rank's last block.
    """

    work: Workload
    layers: Number
    block: BlockBytes
    tables: Tables
    kept: Number
    fixed: Number
    flying: Number
    gradients: Number
    each: Number
    is_first: Flag
    earlier: Number
    begun: Number
    late: Flag
    sums: Gradients


def moments_of(
    work: Workload,
    rank: Number,
    layers: Number,
    block: BlockBytes,
    tables: Tables,
    gradients: tuple[Number, Number],
    copied: Number,
) -> PeakMoments:
    """Return the moments at which the memory of a rank may peak.

    Args:
        work: The workload, with the kinds of blocks that the rank has.
        rank: The pipeline rank.
        layers: Number of blocks on the rank.
        block: The bytes of a block.
        tables: Numbers of weight entries in the rank's embeddings and head.
        gradients: Two numbers of bytes: all gradients between two backward passes, and in the optimizer step.
        copied: Bytes of the copies that the optimizer step makes.
    """
    held, complete = (np.where(work.program.offloads_optimizer, 0, size) for size in gradients)
    block = with_predictions(work, block, tables)
    memory = _memory_of(work, rank, layers, block, tables, held)
    weights = gathered_weights(work, layers, tables)
    # The optimizer step casts replicated gradients one by one. During the last and largest cast, the gradient of the
    # head is in memory in both dtypes.
    cast = np.where(is_replicated(work) & (complete > held), work.step.reduce_bytes * tables.own_head, 0)
    return PeakMoments(
        _in_head(memory, weights),
        [*_in_blocks(memory, weights), *_in_embedding(memory, weights.at_end)],
        Moment(complete, weights.at_end, np.maximum(copied + cast, received_copy(work, tables))),
    )


def _memory_of(
    work: Workload, rank: Number, layers: Number, block: BlockBytes, tables: Tables, gradients: Number
) -> RankMemory:
    layout, each = work.layout, gradient_bytes(work)[0]
    flying = in_flight(work, rank)
    # If all forward passes come first, the head's tensors of all earlier micro-batches wait for their backward pass. In
    # all other schedules, the head's backward directly follows its forward.
    waits = np.where(tables.is_last & (layout.pp > 1) & layout.forwards_first, block.head_kept, 0)
    kept = kept_by_micro_batch(work, layers, block) + waits + kept_by_predictions(work, tables)
    fixed = inputs_and_kept_weights(work, layers, tables) - waits
    fixed = fixed + np.where(work.program.unused_gradients, work.step.item_bytes * block.entries, 0)
    # If all micro-batches of the step are in flight, the first backward pass begins without gradients. The second
    # backward pass begins with gradients, but with the activations of one micro-batch less. Memory peaks in the second
    # backward pass if the gradients need more memory than these activations.
    is_full = np.greater_equal(flying, work.micro_batches) & ~np.asarray(work.program.half_weights, bool)
    is_next = is_full & (flying > 1) & (gradients > kept)
    is_first = is_full & ~is_next
    # In an interleaved pipeline with one round of micro-batches, only the rank's last stage has gradients at the peak.
    is_round = layout.in_rounds & (work.micro_batches < 2 * layout.pp) & ~is_full
    of_last = each * (tables.own_head + tables.for_predictions)
    of_last = of_last + (gradients - of_last - each * tables.embedding) / layout.stages_per_rank
    earlier = np.where(is_first, 0, np.where(is_round, of_last, gradients))
    begun = fixed + (flying - is_next) * kept
    late, sums = _sums(work, layers, block, tables, is_first)
    return RankMemory(
        work, layers, block, tables, kept, fixed, flying, gradients, each, is_first, earlier, begun, late, sums
    )


def _in_head(memory: RankMemory, weights: GatheredWeights) -> list[Moment]:
    """Return the moments of the head: the first forward pass, a later forward pass, the backward pass, and the sum of
    its gradients over ranks."""
    work, block, tables, begun = memory.work, memory.block, memory.tables, memory.begun
    item, impossible = work.step.item_bytes, np.where(tables.is_last, 0, -np.inf)
    # If all forward passes come first, there are no gradients in the head's forward passes.
    is_before = work.layout.forwards_first & (memory.flying >= work.micro_batches)
    saved = np.where(is_before, memory.fixed + memory.flying * memory.kept, begun)
    in_backward = weights.after_head + np.where(is_freed_after_use(work), item * tables.own_head, 0)
    # The head's gradient for this micro-batch, unless the matmul adds it directly to the summed gradients.
    gradient = np.where(work.program.fuses_accumulation, 0, item * tables.head)
    # If no head runs forward between two backward passes, the buffer of the earlier pass's last sum is still in memory.
    # With prediction layers in a pipeline, this is the sum of the embedding's copy.
    stays = tables.predicts & (work.layout.pp > 1) & work.layout.forwards_first
    copied = np.where(stays, memory.sums.of_block * tables.own_head, 0)
    backward = block.head_kept + block.full + gradient + copied
    return [
        Moment(0, weights.in_head, begun + block.head + impossible),
        Moment(np.where(is_before, 0, memory.earlier), weights.in_later_heads, saved + block.head + impossible),
        Moment(memory.earlier, in_backward, begun + backward + impossible),
        _sum_of_gradients(memory, weights.after_head, tables.own_head * _copied_of_table(memory)),
    ]


def _in_blocks(memory: RankMemory, weights: GatheredWeights) -> list[Moment]:
    """Return five moments of blocks:

    - the backward pass of the block that needs the most memory
    - the sum of the last block's gradients
    - the backward pass of the rank's first block
    - the same backward pass for the first micro-batch, if the step has two micro-batches
    - the backward pass of the rank's second block
    """
    work, layers, block, sums = memory.work, memory.layers, memory.block, memory.sums
    tied = _tied_gradient(memory)
    # The gradient of the embedding waits only after the prediction layers. By then, they have freed their tensors.
    freed = work.model.predictions * block.kept(work, 1) + kept_by_predictions(work, memory.tables)
    waiting = np.where(memory.tables.predicts, np.maximum(tied - freed - weights.of_projections, 0), tied)
    in_block = waiting + kept_and_in_backward(work, layers, block, sums)[1]
    # A block's weights are first gathered into a buffer, so for a moment they are in memory twice.
    is_alone = is_freed_after_use(work) & np.equal(layers, 1)
    in_block = np.where(is_alone, np.maximum(in_block, weights.in_block + sums.before), in_block)
    in_sum = block.full + sums.copied * block.in_unit(last_block(work)) - block.kept(work, 1) - kept_weights(work)[0]
    begin, second, of_block = _first_blocks(work, layers, block, sums)
    of_first = np.where(memory.is_first, of_block, 0)
    end, next_begun = _gradients_of_blocks(memory), memory.begun - memory.kept + tied
    # In the first of two backward passes, the rank's first block has no gradients yet, but no weights are freed.
    is_first_of_two = ~np.asarray(memory.is_first) & np.equal(work.micro_batches, 2)
    in_first_of_two = np.where(is_first_of_two, next_begun + begin, -np.inf)
    second = np.where(np.greater(layers, 2), next_begun + second, -np.inf)
    before = np.where(memory.is_first, memory.each * memory.tables.own_head, memory.earlier)
    return [
        Moment(before, weights.in_block, memory.begun + in_block),
        _sum_of_gradients(memory, weights.in_block, tied + in_sum),
        Moment(end - of_first, weights.in_first, next_begun + begin),
        Moment(end - of_block, weights.in_block, in_first_of_two),
        Moment(end - 2 * of_first, weights.in_second, second),
    ]


def _in_embedding(memory: RankMemory, weights: Number) -> list[Moment]:
    """Return two moments of the embedding: its backward pass, and the sum of its gradients over ranks. ``weights`` is
    the bytes of gathered weights."""
    layout, tied, sums = memory.work.layout, 2 * _tied_gradient(memory), memory.sums
    entries, of_table = memory.tables.embedding, memory.each * memory.tables.embedding
    # Both parts of a tied gradient and their sum are in memory. Later, a replicated gradient is cast. Count the larger
    # of these two amounts.
    summands = np.where(is_replicated(memory.work), np.maximum(tied, sums.size * entries), tied)
    backward = (
        memory.work.step.item_bytes * entries
        + summands
        + sums.of_block * memory.block.in_unit(first_block(memory.work))
    )
    # When the embedding's gradients are summed late, the gradients of blocks are already sharded.
    of_blocks = (memory.gradients - of_table) * np.where(layout.zero == 1, 1 / layout.shards, 1)
    end = _gradients_of_blocks(memory)
    in_sum = _sum_of_gradients(memory, weights, entries * _copied_of_table(memory) - memory.kept)
    return [
        Moment(end, weights, memory.begun - memory.kept + backward),
        in_sum._replace(gradients=np.where(memory.late, of_table + of_blocks, end)),
    ]


def _sum_of_gradients(memory: RankMemory, weights: Number, added: Number) -> Moment:
    """Return the moment when a unit's gradients are summed over ranks. ``weights`` is the bytes of gathered weights,
    and ``added`` is the bytes that the sum adds. Late sums run only in the backward pass of the last micro-batch."""
    begun = np.where(memory.late, memory.fixed + memory.kept, memory.begun)
    return Moment(np.where(memory.late, memory.gradients, memory.earlier), weights, begun + added)


def _gradients_of_blocks(memory: RankMemory) -> Number:
    """Return the bytes of gradients after the backward pass of the rank's first block."""
    return memory.gradients - np.where(memory.is_first, memory.each * memory.tables.embedding, 0)


def _tied_gradient(memory: RankMemory) -> Number:
    """Return the bytes of the part of the embedding's gradient that stays in memory until the embedding's own backward
    pass: the part of the head, if they share one weight, or the part of the prediction layers."""
    tables, work = memory.tables, memory.work
    shared = work.step.item_bytes * (tables.head - tables.own_head) * np.equal(work.layout.pp, 1)
    waits = (is_sharded(work) | np.equal(work.layout.pp, 1)) & ~np.asarray(work.model.tie_word_embeddings, bool)
    return shared + np.where(tables.predicts & waits, work.step.item_bytes * tables.head, 0)


def _copied_of_table(memory: RankMemory) -> Number:
    """Return ``Gradients.copied`` for the embedding and for the head. If their weights are freed after use, do not
    subtract these weights, because ``GatheredWeights`` does not include them here."""
    return memory.sums.copied + np.where(is_freed_after_use(memory.work), memory.work.step.item_bytes, 0)


def _first_blocks(work: Workload, layers: Number, block: BlockBytes, sums: Gradients) -> tuple[Number, Number, Number]:
    """Return three numbers of bytes: activations in the backward pass of the rank's first block, activations in the
    backward pass of its second block, and the gradients of one block after its backward pass."""
    first = first_block(work)
    before = np.where(np.greater(layers, 1), sums.of_block * block.in_unit(last_block(work)), sums.before)
    kept, in_backward = kept_and_in_backward(first, 1, block, sums._replace(before=before))
    entries = first.block_weights / (work.layout.x * work.layout.y)
    if not has_experts(work):
        return kept + in_backward, 2 * kept + in_backward, gradient_bytes(work)[0] * entries
    experts = states_of_experts(first)
    of_experts = gradient_bytes(experts)[0] * experts.block_weights / (experts.layout.x * experts.layout.y)
    return kept + in_backward, 2 * kept + in_backward, gradient_bytes(work)[0] * entries + of_experts


def _sums(work: Workload, layers: Number, block: BlockBytes, tables: Tables, is_first: Flag) -> tuple[Flag, Gradients]:
    """Return whether gradients are summed over ranks only in the step's last backward pass, and the bytes of weight
    gradients during the backward pass of the rank's last block.

    ``is_first`` says whether this is the step's first backward pass, before which no gradients exist.
    """
    layout, item, reduced = work.layout, work.step.item_bytes, work.step.reduce_bytes
    several = np.asarray(work.micro_batches > 1)
    is_fsdp = is_sharded(work)
    late, copied = _copied(work)
    # With replicas or ``zero`` 1, a copy of the gradients is summed in the step's last backward pass.
    replicated = is_replicated(work) & np.asarray(work.program.is_fourfold, bool)
    size = np.where(is_fsdp, item, np.where(replicated & is_first, reduced, 0))
    sums_replicas = replicated & (layout.dp * layout.cp > 1)
    copied = np.where(is_fsdp, copied, np.where(sums_replicas, reduced + np.where(several, 0, size), 0))
    of_block = np.where(is_fsdp & ~late, reduced, 0)
    first = of_block * tables.own_head
    of_embedding = np.where(np.greater(tables.positions, 0), tables.positions, tables.embedding)
    earlier = of_block * np.where(tables.is_first, of_embedding, block.in_unit(first_block(work))) * several
    after_one = of_block * block.in_unit(last_block(work)) - block.kept(work, 1) - kept_weights(work)[0]
    first = np.maximum(first, np.where(np.greater(layers, 2), after_one, 0))
    before = np.where(tables.is_last | is_first, first, np.maximum(earlier, first))
    # Some pipeline schedules compute weight gradients after the backward pass.
    size, copied = (np.where(layout.split_backward, 0, each) for each in (size, copied))
    if not has_experts(work):
        return late | (replicated & several), Gradients(size, before, of_block, copied=copied)
    late_experts, of_experts = _copied(states_of_experts(work))
    buffer = np.where(late_experts, 0, reduced)
    return late | (replicated & several), Gradients(size, before, of_block, buffer, copied, of_experts)


def _copied(work: Workload) -> tuple[Flag, Number]:
    """Return whether FSDP2 sums gradients only in the step's last backward pass, and how many bytes per entry a unit's
    gradients and their copies have during the sum, minus the weights that FSDP2 has just freed."""
    layout, item, reduced = work.layout, work.step.item_bytes, work.step.reduce_bytes
    several = layout.dp * layout.cp > 1
    late = (layout.zero == 1) & (layout.shards > 1) & (work.micro_batches > 1)
    own = np.where(late, 0, item)
    # Weights that are gathered once per step are freed only in the last backward pass.
    freed = np.where(is_resharded(work) | (work.micro_batches <= 2) | late, item, 0)
    # If no other rank shards the gradients, they are copied only once. With replicas, FSDP2 also divides the copy by a
    # factor, which makes another tensor.
    alone = np.maximum(own + reduced, np.where(several, 2 * reduced, 0))
    return late, np.where(layout.shards > 1, own + reduced * (1 + 1 / layout.shards), alone) - freed
