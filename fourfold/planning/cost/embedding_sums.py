"""Compute how the sums of the embedding's gradients raise the peak memory of a pipeline rank without a head."""

from __future__ import annotations

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.block_memory import BlockBytes, inputs_and_kept_weights, is_resharded, kept_by_micro_batch
from fourfold.planning.cost.stage_split import in_flight
from fourfold.planning.workload import Workload


def with_embedding(
    work: Workload, rank: Number, layers: Number, block: BlockBytes, held: tuple[Number, ...], entries: Number
) -> Number:
    """Return the peak bytes of activations on a rank in a step with several micro-batches. In a pipeline, the result
    includes the embedding's gradients that FSDP2 holds and sums.

    Args:
        rank: The pipeline rank.
        layers: Number of blocks on the rank.
        block: The bytes of a block.
        held: Four numbers of bytes: the activations when a backward pass begins, all gradients, the gathered weights,
            and the gradients of one block while they are summed. The third number includes the fourth number.
        entries: Number of weight entries in the rank's tile of the embedding. 0 if the rank has no embedding.
    """
    (activations, gradients, weights, of_block), layout, step = held, work.layout, work.step
    flying, kept = in_flight(work, rank), kept_by_micro_batch(work, layers, block)
    # Without shards, and with ``zero`` = 1, gradients are summed only at the end of a step, when few activations are
    # left.
    is_late = (layout.shards == 1) | ((layout.zero == 1) & (layout.dp * layout.cp > 1))
    # FSDP2 holds the embedding's gradients until it sums the gradients of a block in the next backward pass.
    summed = np.where(is_late, 0, step.reduce_bytes * entries)
    waiting = np.maximum(summed - np.maximum(of_block, 0), 0)
    # If all micro-batches are in flight, no gradients exist until the first backward pass has freed its activations.
    is_full = np.equal(flying, work.micro_batches)
    started = activations + waiting - np.where(is_full, np.minimum(gradients + waiting, kept), 0)
    # At the end of a backward pass, the gradients in the step's dtype are copied to be summed. The sum is a new tensor.
    sums = step.reduce_bytes * entries / layout.shards
    copied = (flying - 1) * kept + step.item_bytes * entries + summed + sums - np.where(is_resharded(work), weights, 0)
    copied = np.where(is_late, 0, copied - np.where(is_full, np.minimum(sums, kept), 0))
    later = np.maximum(started, inputs_and_kept_weights(work, layers) + copied)
    has_several = (layout.pp > 1) & (work.micro_batches > 1)
    return np.where(has_several & np.asarray(work.program.is_fourfold, bool), later, activations)
