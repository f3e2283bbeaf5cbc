"""Compute the bytes of the gathered weights on a rank, and of the weights that it keeps between forward and
backward."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.expert_sizes import (
    dense_share,
    has_dense_first,
    has_experts,
    has_own_shards,
    kinds_of_blocks,
    states_of_experts,
)
from fourfold.planning.workload import Workload


class Tables(NamedTuple):
    """Numbers of weight entries of the *tables* on a rank. The tables are the embeddings and the head.

    - embedding, positions, head: entries of the token embedding, of the position embedding, and of the head. 0 if the
      rank does not have this table.
    - own_head: entries of the head, or 0 if the head shares the weight of the rank's embedding.
    - for_predictions: entries of the prediction layers' projections, and of the last rank's copy of the embedding for
      these layers.
    - is_first, is_last: whether the rank has the embedding, and whether it has the head.
    """

    embedding: Number
    positions: Number
    head: Number
    own_head: Number
    is_first: Flag
    is_last: Flag
    for_predictions: Number

    @property
    def predicts(self) -> Flag:
        """Return whether the rank has prediction layers."""
        return np.greater(self.for_predictions, 0)

    @property
    def every(self) -> Number:
        """Return the number of entries of all tables. A weight that embedding and head share counts once."""
        return self.embedding + self.positions + self.own_head + self.for_predictions


def tables_of(work: Workload, rank: Number) -> Tables:
    """Return the numbers of weight entries in the tables of a pipeline rank."""
    model, layout = work.model, work.layout
    first, last = np.equal(rank, 0), np.equal(rank, layout.pp - 1)
    last = np.where(layout.v_shaped & (layout.pp > 1), first, last)
    width = model.hidden_size / (layout.x * layout.y)
    is_shared = first & np.asarray(model.tie_word_embeddings, bool) & (layout.pp == 1)
    embedding, head = (np.where(has_one, model.padded_vocab_size * width, 0) for has_one in (first, last))
    positions = np.where(first, model.positions * width, 0)
    copies = np.greater(model.predictions, 0) & (layout.pp > 1)
    # Each rank of x has a copy of the prediction layers' projections.
    projections = model.projection_weights / layout.y
    for_predictions = np.where(last, projections + np.where(copies, head, 0), 0)
    return Tables(embedding, positions, head, np.where(is_shared, 0, head), first, last, for_predictions)


def is_replicated(work: Workload) -> Flag:
    """Return whether weights and gradients are replicated instead of sharded, as in ``parallel.data.replicated``."""
    layout = work.layout
    return (layout.z == 1) & ((layout.zero == 0) | (layout.dp * layout.cp == 1))


def is_sharded(work: Workload) -> Flag:
    """Return whether FSDP2 shards weights and gradients."""
    return ~np.asarray(work.program.half_weights, bool) & (work.layout.shards > 1)


def is_resharded(work: Workload) -> Flag:
    """Return whether gathered weights are freed after their forward pass, and gathered again for the backward pass."""
    layout = work.layout
    return (layout.z > 1) | ((layout.zero == 3) & (layout.dp * layout.cp > 1))


def is_freed_after_use(work: Workload) -> Flag:
    """Return whether gathered weights are freed after their forward pass, and the framework does not store 16-bit
    weights (``Program.half_weights``)."""
    freed: Flag = is_resharded(work) & ~np.asarray(work.program.half_weights, bool)
    return freed


def kept_bytes(work: Workload) -> Number:
    """Return the bytes of ``kept_weights`` per entry of the weights that the rank has before z splits them."""
    keeps = (work.layout.zero > 0) & (work.layout.zero < 3) & (work.layout.z > 1)
    return np.where(keeps, work.step.item_bytes / work.layout.z, 0)


def kept_weights(work: Workload) -> tuple[Number, Number]:
    """Return the bytes of weights that a rank holds between forward and backward pass, in the step's dtype.

    With ``zero`` 1 or 2 and z > 1, a rank keeps weights that are split only over z (docs/parallelism.md). In all other
    cases, the bytes are 0.

    Returns:
        The bytes of one block with its experts, and the bytes of the embeddings. A token embedding that shares the
        head's weight counts 0, because the head's weight stays gathered.
    """
    model, layout = work.model, work.layout
    entry = kept_bytes(work) / (layout.x * layout.y)
    tables = (model.positions + np.where(model.tie_word_embeddings, 0, model.padded_vocab_size)) * model.hidden_size
    of_experts = kept_weights(states_of_experts(work))[0] if has_experts(work) else 0
    return entry * work.block_weights + of_experts, entry * tables


def inputs_and_kept_weights(work: Workload, layers: Number, tables: Tables) -> Number:
    """Return the bytes of the step's inputs, plus the bytes of the weights that a rank with ``layers`` blocks holds
    between forward and backward pass (``kept_weights``)."""
    (of_block, of_tables), step = kept_weights(work), work.step
    inputs = 16 * work.layout.micro_batch_size * step.seq_length * work.micro_batches
    rotary = 4 * step.seq_length * work.model.head_dim * work.model.rope
    of_predictions = kept_bytes(work) * tables.for_predictions
    return inputs + rotary + layers * of_block + tables.is_first * of_tables + of_predictions


class GatheredWeights(NamedTuple):
    """Bytes of gathered weights or of 16-bit copies on a rank.

    - in_block: bytes in the backward pass of most blocks.
    - in_second, in_first: bytes in the backward pass of the rank's second block, and of the rank's first block.
    - in_head, in_later_heads: bytes while the head runs, for the first micro-batch and for later micro-batches. If
      weights are gathered once per step, the buffer of the last all-gather is still in memory during the first
      micro-batch.
    - after_head: bytes while the gradients of the head are summed.
    - at_end: bytes after the backward pass of the rank's first block.
    - of_projections: bytes of the projections of one prediction layer, which ``in_block`` includes.
    """

    in_block: Number
    in_second: Number
    in_first: Number
    in_head: Number
    in_later_heads: Number
    after_head: Number
    at_end: Number
    of_projections: Number


def gathered_weights(work: Workload, layers: Number, tables: Tables) -> GatheredWeights:
    """Return the bytes of gathered weights on a rank with ``layers`` blocks.

    The backward pass does not gather the embedding, because the embedding's gradient does not depend on its weight.
    """
    item, is_freed, single = work.step.item_bytes, is_freed_after_use(work), np.equal(work.micro_batches, 1)
    copy, sharded = _copy_bytes(work), is_sharded(work)
    kept = layers * _bytes_of_block(work)[1]
    once = kept + np.where(is_freed, copy * (tables.head - tables.own_head), copy * tables.every)
    # A stage does not prefetch weights of another stage.
    of_stage = np.ceil(layers / work.layout.stages_per_rank)
    gathered = np.minimum(1 + work.program.prefetch + work.parts_cross_blocks, of_stage)
    first, last = _bytes_of_block(first_block(work)), _bytes_of_block(last_block(work))
    projections = np.where(tables.predicts & is_freed, copy * 2 * work.model.prediction_width**2 / work.layout.y, 0)
    if has_dense_first(work):
        dense, sparse = (_bytes_of_block(kind) for kind in kinds_of_blocks(work))
        share, in_block = dense_share(work), once
        for own, other, number in ((dense, sparse, layers * share), (sparse, dense, layers * (1 - share))):
            several = np.minimum(gathered, number)
            together = once + several * own[0] + (gathered - several) * other[0]
            in_block = np.maximum(in_block, np.where(number > 0, together, 0))
    else:
        in_block = once + gathered * first[0]
    in_block = in_block + projections
    one = once + last[0] + projections
    own_head = np.where(sharded, item * tables.own_head, 0)
    # If weights are gathered once per step, the buffer of the last all-gather is still in memory.
    buffer = np.where(np.greater(tables.own_head, 0), own_head, last[1] * sharded)
    # If all forward passes come first, only the first micro-batch gathers the head.
    is_gathered = np.greater(tables.own_head, 0) & ~(work.layout.forwards_first & ~single)
    in_head = np.where(is_gathered, once + 2 * own_head, one + own_head)
    # Prediction layers run between the all-gather of the head and the loss.
    in_head = np.where(tables.predicts, once + own_head + _last_gathered(work, last, projections), in_head)
    # In the last backward pass, weights that are gathered once per step are freed too.
    left = once - kept - np.where(is_freed, 0, copy * tables.own_head) + sum(first)
    left = np.where(_frees_in_last_backward(work), left, np.where(is_freed, once + first[0], in_block))
    return GatheredWeights(
        in_block,
        in_block - np.maximum(layers - 2, 0) * freed_by_block(work),
        left,
        np.where(is_freed, in_head, in_block + buffer),
        np.where(is_freed, in_head, in_block),
        np.where(is_freed, one, in_block),
        np.where(is_freed, 0, left),
        projections,
    )


def _last_gathered(work: Workload, last: tuple[Number, Number], projections: Number) -> Number:
    """Return the bytes of the last all-gather of a prediction layer: all its weights, or only its experts if they are
    gathered separately. ``last`` is the result of ``_bytes_of_block`` for the rank's last block."""
    if not has_experts(work):
        return last[0] + projections
    others = _copy_bytes(work) * last_block(work).block_weights / (work.layout.x * work.layout.y)
    of_experts = last[0] - others + np.where(is_sharded(states_of_experts(work)), last[1], 0)
    return np.where(has_own_shards(work) & is_freed_after_use(work), of_experts, last[0] + projections)


def first_block(work: Workload) -> Workload:
    """Return a workload whose blocks are all like the rank's first block. The first block has a dense MLP if any block
    of the rank has one."""
    if not has_dense_first(work):
        return work
    return work.but(sparse=np.where(dense_share(work) > 0, 0.0, work.model.sparse))


def freed_by_block(work: Workload) -> Number:
    """Return the bytes of gathered weights that a block's backward pass frees although they are gathered only once per
    step. FSDP2 frees them in the step's last backward pass. With more than two micro-batches, memory peaks before this
    pass, so return 0."""
    return np.where(_frees_in_last_backward(work), _bytes_of_block(work)[1], 0)


def _frees_in_last_backward(work: Workload) -> Flag:
    frees: Flag = is_sharded(work) & np.asarray(work.micro_batches <= 2)
    return frees


def last_block(work: Workload) -> Workload:
    """Return a workload whose blocks are all like the rank's last block. The last block has experts if any block of
    the rank has them."""
    if not has_dense_first(work):
        return work
    return work.but(sparse=np.where(dense_share(work) < 1, np.sign(work.model.num_experts), 0.0))


def _copy_bytes(work: Workload) -> Number:
    """Return the bytes per entry of a gathered weight or of a 16-bit copy. Return 0 if there is no copy."""
    step, program = work.step, work.program
    item = np.where(program.autocast, step.weight_bytes, step.item_bytes)
    copies = (work.layout.shards > 1) | (step.weight_bytes != step.item_bytes)
    return np.where(copies & ~np.asarray(program.half_weights, bool), item, 0)


def _bytes_of_block(work: Workload) -> tuple[Number, Number]:
    """Return two numbers of bytes for one block: gathered weights that are freed after use, and weights that are kept
    until the step ends."""
    is_freed = is_freed_after_use(work)
    size = _copy_bytes(work) * work.block_weights / (work.layout.x * work.layout.y)
    freed, kept = np.where(is_freed, size, 0), np.where(is_freed, 0, size)
    if not has_experts(work):
        return freed, kept
    # FSDP2 copies experts even if no other rank shards them. With ``zero`` 3, it frees the copies after use.
    experts, own = states_of_experts(work), has_own_shards(work)
    copy = np.where(own, work.step.item_bytes, _copy_bytes(experts))
    size = copy * work.model.expert_weights / (experts.layout.x * experts.layout.y)
    is_freed = is_freed_after_use(experts) | (own & (work.layout.zero == 3))
    return freed + np.where(is_freed, size, 0), kept + np.where(is_freed, 0, size)
