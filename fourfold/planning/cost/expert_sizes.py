"""Compute the sizes of an MoE layer's experts on one rank: the number of rows, the grid that holds the weights, and the
bytes of activations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.workload import Workload

BYTES_OF_A_CHOICE = 44.0
"""Bytes that are kept for each choice of a token: the expert, the choice's position among the rows, and the inverse of
that position (64 bits each), and the weights."""
BYTES_OF_AN_ORDER = 32.0
"""Bytes that are kept for each received row to sort it by expert. Forward and backward each keep a permutation and its
inverse, in 64 bits."""


def fuses_gate(work: Workload) -> Flag:
    """Return whether the activation of the gate is not kept for the backward pass."""
    fused: Flag = np.asarray(work.program.fused_gate, bool) | np.asarray(work.model.clamps_gate, bool)
    return fused


def has_experts(work: Workload) -> bool:
    """Return whether at least one case is an MoE model."""
    return bool(np.any(work.model.num_experts))


def has_dense_first(work: Workload) -> bool:
    """Return whether at least one case is an MoE model whose first blocks have a dense MLP."""
    return bool(np.any(work.model.dense_first))


def dense_share(work: Workload) -> Number:
    """Return the fraction of an MoE model's blocks that have a dense MLP."""
    return np.where(np.asarray(work.model.num_experts) > 0, 1 - np.asarray(work.model.sparse), 0.0)


def kinds_of_blocks(work: Workload) -> tuple[Workload, Workload]:
    """Return two workloads: one in which all blocks have a dense MLP, and one in which all blocks have experts."""
    dense = work.but(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, sparse=0.0,
                     shared_expert_intermediate_size=0, shared_expert_gate=False)  # fmt: skip
    return dense, work.but(sparse=np.where(np.asarray(work.model.num_experts) > 0, 1.0, 0.0))


def where_experts(work: Workload, value: Number) -> Number:
    """Return the value for workloads with experts, and 0 for workloads without experts."""
    return np.where(np.asarray(work.model.num_experts) > 0, value, 0.0)


class Rows(NamedTuple):
    """Rows of one micro-batch. Each choice of a token gives one row.

    The fields are the number of rows that a rank sends for its own tokens, the number of rows that its experts compute,
    the number of rows of each expert, and the number and width of the rank's experts.
    """

    sent: Number
    on_rank: Number
    each: Number
    experts: Number
    inner: Number


def rows_of(work: Workload) -> Rows:
    """Return the rows for a balanced load or a given load.

    The capacity limits both the rows that a rank sends and the rows that an expert accepts.
    """
    model, layout, step = work.model, work.layout, work.step
    limit = np.where(step.capacity > 0, step.capacity, np.inf)
    sent = work.tokens / layout.x * model.num_experts_per_tok * np.minimum(limit, 1.0)
    over_x = np.where(work.program.experts_over_x, layout.x, 1)
    here = work.tokens / layout.x * over_x * model.num_experts_per_tok * np.minimum(step.imbalance, limit)
    experts = np.maximum(model.num_experts, 1) / layout.ep
    return Rows(sent, here, here / experts, experts, model.moe_intermediate_size / over_x)


def states_of_experts(work: Workload) -> Workload:
    """Return a workload that has only the weights of the experts. Its y is y·ep.

    With this workload, the formulas for dense weights (split over x · y, sharded over z, copied over dp · cp) give the
    sizes for the experts. Its z is the number of ranks that shard the same experts, and its dp is the number of their
    replicas.
    """
    model, layout, step = work.model, work.layout, work.step
    over_x = np.asarray(work.program.experts_over_x, bool)
    ranks = layout.dp * layout.cp * layout.z * np.where(over_x, 1, layout.x)
    z = np.maximum(layout.z / layout.ep, 1.0)
    copies = np.maximum(ranks / (layout.ep * z), 1.0)
    width = model.moe_intermediate_size * model.num_experts * model.sparse
    return work.but(
        queries=0, keys=0, intermediate_size=width, gate_up=2 * width, padded_vocab_size=0, positions=0,
        num_experts=0, sparse=0, q_latent=0, kv_latent=0, shared_key=0,
        x=np.where(over_x, layout.x, 1), y=layout.y * layout.ep, z=z, dp=copies, cp=1, ep=1,
        # Scale the batch with the axes that split it, so that the number of micro-batches stays the same.
        global_batch_size=step.global_batch_size * copies * z / (layout.dp * layout.z),
    )  # fmt: skip


def kept_by_experts(work: Workload, selective: bool) -> Number:
    """Return the mean number of bytes per block that router, dispatch, and experts keep for a micro-batch.

    The router keeps its input tokens and its scores in fp32. The experts keep their input rows, gate, up, silu(gate),
    and silu(gate) · up. The dispatch keeps the rows that return from the experts, for the gradients of the router's
    weights. Other programs apply the router's weights inside the experts and do not keep these rows.
    """
    model, layout, step, program = work.model, work.layout, work.step, work.program
    rows, hidden = rows_of(work), model.hidden_size / layout.y
    in_8, item = np.asarray(program.keeps_float8_inputs, bool), step.item_bytes
    read = np.where(in_8, 1.0, item) * rows.on_rank * hidden
    before = 2 * item * rows.on_rank * rows.inner
    again = np.asarray(program.recomputes_mlp, bool) & selective
    mlp = before + np.where(again, 0, _activated(work, rows))
    back = np.where(program.is_fourfold, item * rows.sent * hidden, 0)
    tokens = work.tokens / layout.x
    read_by_router = np.where(program.is_fourfold, 4, item) * tokens * hidden
    router = read_by_router + 4 * tokens * model.num_experts + BYTES_OF_A_CHOICE * tokens * model.num_experts_per_tok
    order = np.where((layout.x * layout.ep > 1) & (rows.experts > 1), BYTES_OF_AN_ORDER * rows.on_rank, 0)
    return model.sparse * (router + read + mlp + back + order + kept_by_shared_gate(work))


def choices_kept(work: Workload) -> Number:
    """Return the mean number of bytes per block that the tokens' choices of experts take, in 64 bits. They are kept,
    because fourfold's recomputation reuses them."""
    model = work.model
    chosen = model.num_experts_per_tok
    return np.where(work.program.is_fourfold, model.sparse * 8 * work.tokens / work.layout.x * chosen, 0.0)


def kept_by_shared_gate(work: Workload) -> Number:
    """Return the bytes that the gate of one block's shared expert keeps: its input in fp32, and the output that the
    gate multiplies."""
    model, layout = work.model, work.layout
    residual = work.tokens / layout.x * model.hidden_size / layout.y
    return np.where(model.shared_expert_gate, (4 + work.step.item_bytes) * residual, 0)


def experts_made_again(work: Workload) -> Number:
    """Return the mean number of bytes per block of the experts' activation, which selective recompute drops."""
    return work.model.sparse * _activated(work, rows_of(work))


def _activated(work: Workload, rows: Rows) -> Number:
    """Return the bytes of silu(gate) and its product with up."""
    program, inner = work.program, work.step.item_bytes * rows.on_rank * rows.inner
    product = np.where(program.keeps_float8_inputs, inner / 2, inner)
    return product + np.where(fuses_gate(work), 0, inner)


def backward_of_experts(work: Workload) -> tuple[Number, Number]:
    """Return the peak bytes of the backward of a block's experts, first for weights that are sharded over data-parallel
    ranks, and then for whole weights.

    Two sets of tensors may cause the peak. The first set is the gradients of gate, of up, and of their product (and one
    more tensor if the gate is clamped). The second set is the gradients of the rows, in the order of arrival and in the
    order of the experts. The two sets are never in memory at the same time.
    """
    rows, model, layout, item = rows_of(work), work.model, work.layout, work.step.item_bytes
    inner, hidden = item * rows.on_rank * rows.inner, item * rows.on_rank * model.hidden_size / layout.y
    weight = model.num_experts * model.hidden_size * model.moe_intermediate_size / (layout.x * layout.y * layout.ep)
    both = np.maximum(np.where(model.clamps_gate, 4, 3) * inner, 2 * hidden)
    return both + item * weight, both + 4 * weight
