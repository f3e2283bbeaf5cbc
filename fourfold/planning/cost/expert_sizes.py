"""Compute the sizes of an MoE layer's experts on one rank: the number of rows, the number of weights, and the bytes of
activations. A token has one *row* for each expert that it is routed to. The token's output is the sum of its experts'
outputs, each multiplied by a *routing weight*."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.workload import Workload

BYTES_OF_A_CHOICE = 44.0
"""Bytes that are saved per token and chosen expert: three 64-bit indices, and 20 bytes for the routing weight. The
indices are the expert, an entry of the permutation that sorts the rows, and an entry of the inverse permutation."""
BYTES_OF_AN_ORDER = 32.0
"""Bytes that are saved per received row to sort rows by expert. The forward and the backward pass each save a
permutation and its inverse, in 64 bits."""


def fuses_gate(work: Workload) -> Flag:
    """Return whether the MLP does not save silu(gate), the activation of the gate, for the backward pass."""
    fused: Flag = np.asarray(work.program.fused_gate, bool) | np.asarray(work.model.clamps_gate, bool)
    return fused


def has_experts(work: Workload) -> bool:
    """Return whether at least one case of ``work`` (such as a layout) has an MoE model."""
    return bool(np.any(work.model.num_experts))


def has_dense_first(work: Workload) -> bool:
    """Return whether at least one case is an MoE model whose first blocks have a dense MLP."""
    return bool(np.any(work.model.dense_first))


def dense_share(work: Workload) -> Number:
    """Return the fraction of an MoE model's blocks that have a dense MLP."""
    return np.where(np.asarray(work.model.num_experts) > 0, 1 - np.asarray(work.model.sparse), 0.0)


def kinds_of_blocks(work: Workload) -> tuple[Workload, Workload]:
    """Return two workloads: one whose blocks all have a dense MLP, and one whose blocks all have experts."""
    dense = work.but(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, sparse=0.0,
                     shared_expert_intermediate_size=0, shared_expert_gate=False)  # fmt: skip
    return dense, work.but(sparse=np.where(np.asarray(work.model.num_experts) > 0, 1.0, 0.0))


def where_experts(work: Workload, value: Number) -> Number:
    """Return ``value`` for cases with experts, and 0 for cases without experts."""
    return np.where(np.asarray(work.model.num_experts) > 0, value, 0.0)


class Rows(NamedTuple):
    """Numbers of rows of one micro-batch, and sizes of a rank's experts. A token has one row for each expert that it is
    routed to.

    - sent: number of rows that a rank sends for its own tokens.
    - on_rank: number of rows that the rank's experts compute.
    - each: mean number of rows per expert of the rank.
    - experts: number of experts on the rank.
    - inner: inner width of the rank's share of each expert.
    """

    sent: Number
    on_rank: Number
    each: Number
    experts: Number
    inner: Number


def rows_of(work: Workload) -> Rows:
    """Return the numbers of rows on one rank. ``on_rank`` is for the ep rank with the most tokens (``Step.imbalance``).

    The capacity factor limits both the rows that a rank sends and the rows that its experts compute.
    """
    model, layout, step = work.model, work.layout, work.step
    limit = np.where(step.capacity > 0, step.capacity, np.inf)
    sent = work.tokens / layout.x * model.num_experts_per_tok * np.minimum(limit, 1.0)
    over_x = np.where(work.program.experts_over_x, layout.x, 1)
    here = work.tokens / layout.x * over_x * model.num_experts_per_tok * np.minimum(step.imbalance, limit)
    experts = np.maximum(model.num_experts, 1) / layout.ep
    return Rows(sent, here, here / experts, experts, model.moe_intermediate_size / over_x)


def states_of_experts(work: Workload) -> Workload:
    """Return a workload whose weights are only the experts' weights. If a formula for dense weights gets this workload,
    the formula returns the sizes of the experts.

    These formulas split weights over x · y, shard them over z, and replicate them over dp · cp. So the workload's y is
    y · ep, its z is the number of ranks that shard the same experts, and its dp is the number of replicas of each
    expert.
    """
    model, layout, step = work.model, work.layout, work.step
    over_x = np.asarray(work.program.experts_over_x, bool)
    z, copies = _shards_and_copies(work)
    width = model.moe_intermediate_size * model.num_experts * model.sparse
    return work.but(
        queries=0, keys=0, intermediate_size=width, gate_up=2 * width, padded_vocab_size=0, positions=0,
        num_experts=0, sparse=0, q_latent=0, kv_latent=0, shared_key=0, linear=0.0, prediction_width=0,
        x=np.where(over_x, layout.x, 1), y=layout.y * layout.ep, z=z, dp=copies, cp=1, ep=1,
        # Scale the batch by the same factor as the axes that split it. The number of micro-batches then stays the same.
        global_batch_size=step.global_batch_size * copies * z / (layout.dp * layout.z),
    )  # fmt: skip


def _shards_and_copies(work: Workload) -> tuple[Number, Number]:
    """Return the number of ranks that shard the same experts over z, and the number of replicas of each expert."""
    layout = work.layout
    ranks = layout.dp * layout.cp * layout.z * np.where(work.program.experts_over_x, 1, layout.x)
    z = np.maximum(layout.z / layout.ep, 1.0)
    return z, np.maximum(ranks / (layout.ep * z), 1.0)


def kept_by_experts(work: Workload, selective: bool) -> Number:
    """Return the bytes that router, dispatch, and experts save for the backward pass of a micro-batch, as a mean over
    all blocks. The dispatch sends rows to the experts and back.

    In fourfold, the router saves its input and its scores in fp32. The experts save their input rows, gate, up,
    silu(gate), and silu(gate) · up. The dispatch saves the rows that return from the experts, for the gradients of the
    routing weights. Other frameworks save the router's input in the step's dtype. They multiply by the routing weights
    inside the experts, so they do not save the returned rows.
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
    """Return the bytes of the chosen expert indices (64 bits each), as a mean over all blocks. A block with full
    recompute saves them, because fourfold's recomputation must choose the same experts."""
    model = work.model
    chosen = model.num_experts_per_tok
    return np.where(work.program.is_fourfold, model.sparse * 8 * work.tokens / work.layout.x * chosen, 0.0)


def kept_by_shared_gate(work: Workload) -> Number:
    """Return the bytes that the gate of one block's shared expert saves: the gate's input in fp32, and the output of
    the shared expert."""
    model, layout = work.model, work.layout
    residual = work.tokens / layout.x * model.hidden_size / layout.y
    return np.where(model.shared_expert_gate, (4 + work.step.item_bytes) * residual, 0)


def experts_made_again(work: Workload) -> Number:
    """Return the bytes of the experts' activation that selective recompute computes again, as a mean over all
    blocks."""
    return work.model.sparse * _activated(work, rows_of(work))


def _activated(work: Workload, rows: Rows) -> Number:
    """Return the bytes of silu(gate) and silu(gate) · up that the experts of one block save."""
    program, inner = work.program, work.step.item_bytes * rows.on_rank * rows.inner
    product = np.where(program.keeps_float8_inputs, inner / 2, inner)
    return product + np.where(fuses_gate(work), 0, inner)


def backward_of_experts(work: Workload) -> tuple[Number, Number]:
    """Return the peak bytes of the backward pass of a block's experts.

    There are three groups of tensors, which are never in memory at the same time. The peak is the size of the largest
    group:

    - the gradients of gate, of up, and of their product, and one more tensor if the gate is clamped
    - the gradients of the rows, once in the order of arrival and once sorted by expert
    - while the last weight gradient is computed: the gradients of all weights, of gate or up, and of the rows from both
      gate and up. By then, all saved tensors are freed, except the experts' input rows and the router's tensors

    Returns:
        The bytes if weights are sharded over data-parallel ranks, and the bytes if weights are replicated over them.
    """
    rows, model, layout, item = rows_of(work), work.model, work.layout, work.step.item_bytes
    inner, width = item * rows.on_rank * rows.inner, item * model.hidden_size / layout.y
    hidden, returned = rows.on_rank * width, np.where(work.program.is_fourfold, rows.sent * width, 0)
    weight = weights_of_experts(work) / 3
    both = np.maximum(np.where(model.clamps_gate, 4, 3) * inner, 2 * hidden)
    last = 2 * hidden + inner - (2 * inner + _activated(work, rows) + returned)
    sharded, replicated = (np.maximum(both + size * weight, last + 3 * size * weight) for size in (item, 4))
    return sharded, replicated


def weights_of_experts(work: Workload) -> Number:
    """Return the number of weight entries of a block's experts that a rank computes with, after it has gathered all
    shards."""
    model, layout = work.model, work.layout
    every = 3 * model.num_experts * model.hidden_size * model.moe_intermediate_size
    return every / (layout.x * layout.y * layout.ep)


def has_own_shards(work: Workload) -> Flag:
    """Return whether FSDP2 gathers experts separately from the block's other weights."""
    layout = work.layout
    has_own: Flag = (layout.ep > 1) & (layout.shards > 1) & np.asarray(work.program.is_fourfold, bool)
    return has_own
