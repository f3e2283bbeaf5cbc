"""Compute the memory that prediction layers (multi-token prediction) need in addition to their blocks."""

from dataclasses import replace

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.block_memory import BlockBytes
from fourfold.planning.cost.gathered_weights import Tables
from fourfold.planning.cost.tensor_sizes import tensor_bytes
from fourfold.planning.workload import Workload


def kept_by_predictions(work: Workload, tables: Tables) -> Number:
    """Return the bytes that the rank's prediction layers save for a micro-batch in addition to their blocks: the
    embeddings, the inputs of both projections, and the input of the output norm."""
    p = tensor_bytes(work)
    return np.where(tables.is_last, work.model.predictions * (4 * p.residual + 3 * p.statistics), 0)


def with_predictions(work: Workload, block: BlockBytes, tables: Tables) -> BlockBytes:
    """Return the bytes of a block and of all calls of the head. Each prediction layer calls the head once, before the
    model's own call. The tensors of all calls stay in memory until their backward passes."""
    calls = np.where(tables.is_last, work.model.predictions, 0)
    return replace(block, head=block.head + calls * block.head_kept, head_kept=(1 + calls) * block.head_kept)


def received_copy(work: Workload, tables: Tables) -> Number:
    """Return the bytes of the embedding's gradient that the rank receives after the last backward pass.

    If the last rank of a pipeline has a copy of the embedding (``ModelShape.copies_embedding``), the first and the last
    rank send each other their gradients of the embedding.
    """
    layout, step = work.layout, work.step
    are_apart = (layout.pp > 1) & ~np.asarray(layout.v_shaped, bool)
    is_end = (tables.is_first | tables.is_last) & np.asarray(work.program.is_fourfold, bool)
    entries = np.maximum(tables.embedding, tables.head) / layout.shards
    return np.where(
        work.model.copies_embedding & are_apart & is_end, entries * np.maximum(step.reduce_bytes, step.weight_bytes), 0
    )
