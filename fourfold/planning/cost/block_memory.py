"""Compute the bytes that a block saves for its backward pass, and the peak of the activations on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Number
from fourfold.planning.cost.attention_memory import attention_backward, kept_by_core, kept_latents
from fourfold.planning.cost.expert_sizes import (
    backward_of_experts,
    choices_kept,
    dense_share,
    experts_made_again,
    fuses_gate,
    has_dense_first,
    has_experts,
    has_own_shards,
    kept_by_experts,
    kept_by_shared_gate,
    kinds_of_blocks,
    weights_of_experts,
    where_experts,
)  # fmt: skip
from fourfold.planning.cost.gathered_weights import freed_by_block, is_replicated, kept_weights
from fourfold.planning.cost.head_memory import head_bytes, head_kept_bytes
from fourfold.planning.cost.linear_attention import has_linear, kinds_of_attention, mean_of_kinds, saved_by_core
from fourfold.planning.cost.tensor_sizes import copies_heads, log_sum_exp_bytes, mlp_made_again, tensor_bytes
from fourfold.planning.workload import CP_METHODS, Workload


def kept_by_block(work: Workload, selective: bool) -> Number:
    """Return the bytes that one block saves for a micro-batch, with ``selective`` recompute or without recompute.

    Without recompute, the layers of ``fourfold.parallel`` make autograd save these tensors:

    - the inputs of both norms
    - the gathered tokens, once for q, k, and v, and once for gate and up
    - the inputs and outputs of the attention kernel
    - the MLP's gate, up, silu(gate), and silu(gate) · up (for GELU, its input and output)
    """
    model, layout, program = work.model, work.layout, work.program
    p = tensor_bytes(work)
    core, core_again = kept_by_core(work)
    made_again = mlp_made_again(work)
    in_8 = np.asarray(program.keeps_float8_inputs, bool)
    fused_away = np.where(fuses_gate(work) & (model.mean_gate_up > model.mean_inner), p.inner, 0)
    # Gate and up are saved, too. They have the same size as silu(gate) and silu(gate) · up.
    mlp = 2 * made_again - fused_away - np.where(in_8, p.inner / 2, 0)
    # The layers save either the gathered input, or only this rank's shard of the input. In the second case, the
    # backward pass gathers the input again (as in Megatron-LM).
    shares = np.asarray(program.regather, bool) | (np.asarray(program.recomputes_gathers, bool) & selective)
    tokens = np.where(shares, p.residual, p.gathered)
    # The output projection saves its input, after the gather over y. The attention kernel saves its output, before the
    # gather. These are two tensors, so both count.
    gathers = (layout.y > 1) & ~shares
    out = np.where(gathers, p.whole_queries, p.queries) * model.values / model.queries
    # With Ulysses, the kernel's output is exchanged over cp before the projection reads it. The exchanged output is
    # another tensor, so the kernel's output counts too.
    exchanged = (layout.cp > 1) & np.equal(layout.cp_method, CP_METHODS.index("ulysses"))
    is_copied = exchanged | copies_heads(work)
    is_apart = (gathers | is_copied) & ~model.has_latents
    # With an output gate, the kernel's output counts. If that output was copied or exchanged, the copy counts too.
    outputs = np.where(model.output_gate, 1 + is_copied, is_apart)
    core = core + np.where(model.linear == 1, 0, outputs) * p.queries
    # With a parallel residual, the norms of attention and MLP read the same tensor, so it counts once.
    read = np.where(model.parallel_residual, 1, model.norms) * p.residual
    # 8-bit matmuls save their inputs in 8 bits, so ``every`` is halved. The input of the output projection is saved
    # twice: in 8 bits by the projection, and in 16 bits by the attention kernel.
    every = (1 + model.mlps) * tokens + np.where(model.has_latents, kept_latents(work, tokens), 0)
    inputs = np.where(in_8, every / 2 + p.queries / 2, every)
    stream = read + model.norms * p.statistics + inputs + out
    if not selective:
        return stream + core + mlp
    attention = np.where(program.recomputes_attention, core_again, core)
    kept = stream + attention + mlp - np.where(program.recomputes_mlp, made_again - fused_away, 0)
    matmuls = model.queries + 2 * model.keys + 2 * model.hidden_size + model.mean_gate_up
    per_op = (
        p.residual
        + p.queries
        + log_sum_exp_bytes(work)
        + work.step.item_bytes * work.tokens * matmuls / (2 * layout.x * layout.y)
    )
    return np.where(program.recomputes_per_op, per_op, kept)


def mlp_backward(work: Workload) -> tuple[Number, Number]:
    """Return the peak bytes of the MLP's backward pass, not counting the tensors that the forward pass has saved.

    Returns:
        The bytes with weight gradients in the step's dtype, and the bytes with fp32 gradients (replicated weights).
    """
    model, layout, step = work.model, work.layout, work.step
    p = tensor_bytes(work)
    weight = model.hidden_size * model.mean_inner / (layout.x * layout.y)
    down = p.inner + p.gathered + step.item_bytes * weight
    # The gradients of gate and up have the same size as silu(gate) and silu(gate) · up.
    activation = mlp_made_again(work)
    sharded, replicated = (np.maximum(activation + size * weight, down) for size in (step.item_bytes, 4))
    return p.residual + sharded, p.residual + replicated


class Gradients(NamedTuple):
    """Bytes of weight gradients in a block's backward pass, in addition to the gradients that exist before this pass.

    FSDP2 sums the gradients of a *unit* of weights together, such as the weights of a block. Before the sum, it copies
    these gradients to a buffer. It keeps the buffer until it sums the next unit's gradients.

    - size: bytes per entry of the block's gradients, until the block's backward pass ends.
    - before: bytes of the buffer with the previous unit's gradients.
    - of_block, of_experts: bytes per weight entry of this buffer, for a block and for the experts of a block.
    - copied, experts_copied: bytes per entry of a block, or of its experts, while their gradients are summed. They
      include the gradients and the copies, minus the weights that FSDP2 has just freed.
    """

    size: Number = 0
    before: Number = 0
    of_block: Number = 0
    of_experts: Number = 0
    copied: Number = 0
    experts_copied: Number = 0


NO_GRADIENTS = Gradients()


@dataclass(frozen=True)
class BlockBytes(ArrayFields):
    """Bytes of the activations of a block and of the head for one micro-batch. Among the layouts of one search, these
    bytes depend only on the fields of ``fastest.BLOCK_KEY``.

    - whole, selective, full: bytes that a block saves for its backward pass if it recomputes nothing, recomputes
      selectively, or recomputes fully.
    - backward, backward_replicated: the two peaks of ``mlp_backward``, or the peaks of the experts' backward pass if
      they are higher.
    - attention_backward: the peak of attention's backward pass (the result of the function ``attention_backward``).
    - mlp_again, core_again: tensors that selective recompute computes again, in the MLP and inside attention.
    - head, head_kept: peak of head and loss, and the tensors that they hold until their backward pass.
    - entries: number of weight entries of the block, without experts.
    - attention_grads: number of these entries whose gradients exist at the peak ``attention_backward``.
    - at_end: activations at the end of the block's backward pass, while the gradient of the first norm is computed.
    - summed_experts: bytes that a block has in memory while the gradients of its experts' weights are summed, not
      counting these gradients. By then, the tensors that the experts saved are freed, but ``whole`` or ``selective``
      still counts them. So they are subtracted here, and the number can be negative.
    - shared_grads: number of weight entries of the shared expert.
    - linear_core: tensors that the core of linear attention saves. A block with full recompute holds them in its entire
      backward pass. Other blocks hold them only at the peak ``attention_backward``, which includes them.
    - dense: the fields for blocks with a dense MLP. None unless some blocks of an MoE model have a dense MLP.
    - linear: the fields for blocks with linear attention. None unless some blocks have linear attention. All fields
      above are then for blocks with softmax attention.
    """

    whole: Number
    selective: Number
    full: Number
    backward: Number
    backward_replicated: Number
    attention_backward: Number
    mlp_again: Number
    core_again: Number
    head: Number
    head_kept: Number
    linear_core: Number
    entries: Number
    attention_grads: Number
    at_end: Number
    summed_experts: Number = -np.inf
    shared_grads: Number = 0.0
    dense: BlockBytes | None = None
    linear: BlockBytes | None = None

    def in_unit(self, work: Workload) -> Number:
        """Return the number of weight entries in the block's unit (``Gradients``). Experts can be a separate unit."""
        if not has_experts(work):
            return self.entries
        return self.entries + np.where(has_own_shards(work), 0, _entries_of_experts(work))

    def kept(self, work: Workload, layers: Number) -> Number:
        """Return the bytes that ``layers`` blocks save for the backward pass of a micro-batch."""
        own = self._kept(work, layers)
        if self.linear is None:
            return own
        return mean_of_kinds(work, own, self.linear.kept(work, layers))

    def _kept(self, work: Workload, layers: Number) -> Number:
        layout = work.layout
        full = np.where(layout.offload, 0, self.full)
        light = np.where(layout.recompute == 2, full, np.where(layout.recompute == 1, self.selective, self.whole))
        recomputed = np.ceil(layers / layout.recompute_every)
        return recomputed * light + (layers - recomputed) * self.whole

    def in_backward(self, work: Workload, layers: Number, grads: Gradients = NO_GRADIENTS) -> Number:
        """Return the peak bytes that the backward pass of one block adds to the saved bytes (``kept``). The rank has
        ``layers`` blocks. ``grads`` has the bytes of weight gradients."""
        own = self._in_backward(work, layers, grads)
        if self.linear is None:
            return own
        # When the backward pass reaches the last block with linear attention, later blocks have freed their tensors.
        later = np.minimum(work.model.after_linear, layers - 1)
        before = np.where(later > 0, grads.of_block * self.in_unit(work), grads.before)
        freed = self._kept(work, later) + later * freed_by_block(work)
        linear = self.linear.in_backward(work, layers, grads._replace(before=before)) - freed
        return np.where(work.model.linear > 0, np.maximum(own, linear), own)

    def _in_backward(self, work: Workload, layers: Number, grads: Gradients) -> Number:
        layout, program = work.layout, work.program
        full = layout.recompute == 2
        by_module = (layout.recompute == 1) & ~np.asarray(program.recomputes_per_op, bool)
        # Subtract the block's input, which is in memory already, unless it was offloaded.
        made = self.whole + self.linear_core - np.where(layout.offload, 0, self.full)
        again = np.where(full, made, np.where(by_module & program.recomputes_mlp, self.mlp_again, 0))
        core_again = np.where(by_module & program.recomputes_attention, self.core_again, 0)
        core_again = core_again - np.where(full, self.linear_core, 0)
        in_32 = is_replicated(work) & ~np.asarray(program.fuses_accumulation, bool)
        in_mlp = np.where(in_32, self.backward_replicated, self.backward)
        in_mlp = in_mlp + grads.size * self.shared_grads + grads.before
        in_attention = self.attention_backward + core_again + grads.size * self.attention_grads
        before = grads.before
        if has_experts(work):
            own, experts = has_own_shards(work), _entries_of_experts(work)
            summed = self.summed_experts + grads.size * self.shared_grads + grads.experts_copied * experts
            in_mlp = np.maximum(in_mlp, np.where(own, summed, -np.inf))
            # Before attention's backward pass, FSDP2 sums the experts' gradients and frees the experts' weights.
            in_attention = in_attention - np.where(own, work.step.item_bytes * experts, 0)
            before = np.where(own, grads.of_experts * experts, before)
            in_attention = in_attention + np.where(own, 0, grads.size * experts)
        # The input of the next recomputed block counts too, because it is already being copied back from host memory.
        several = np.ceil(layers / layout.recompute_every) > 1
        again = again + np.where(full & layout.offload & several, self.full, 0)
        # The blocks after the last recomputed block come first in the backward pass, and have freed what they saved.
        freed = (layers - 1) % layout.recompute_every * self.whole
        backward = np.maximum(in_mlp, in_attention + before) + np.maximum(again - freed, 0)
        # At the end of its backward pass, the block has freed what it saved.
        last = self.at_end + grads.size * self.in_unit(work) + before - self._kept(work, 1)
        highest: Number = np.maximum(backward, np.where(np.greater(grads.size, 0), last, -np.inf))
        return highest


def block_bytes(work: Workload) -> BlockBytes:
    """Return the bytes of a block, for each case (such as a layout) of ``work``."""
    if not has_dense_first(work):
        return _bytes_of_equal_blocks(work)
    dense, others = kinds_of_blocks(work)
    return replace(_bytes_of_equal_blocks(others), dense=_bytes_of_equal_blocks(dense))


def _bytes_of_equal_blocks(work: Workload) -> BlockBytes:
    """Return the bytes of a block for a workload whose blocks all have the same kind of MLP (dense or experts)."""
    if not has_linear(work):
        return _bytes_of_one_kind(work)
    softmax, linear = kinds_of_attention(work)
    return replace(_bytes_of_one_kind(softmax), linear=_bytes_of_one_kind(linear))


def _bytes_of_one_kind(work: Workload) -> BlockBytes:
    p, (core, core_kept) = tensor_bytes(work), kept_by_core(work)
    block = BlockBytes(
        kept_by_block(work, False),
        kept_by_block(work, True),
        p.residual,
        *mlp_backward(work),
        attention_backward(work),
        mlp_made_again(work),
        core - core_kept,
        head_bytes(work),
        head_kept_bytes(work),
        saved_by_core(work),
        *_entries(work),
        p.residual * (3 + np.where(work.model.layer_norm, 12, 8) / work.step.item_bytes),
    )
    return _bytes_with_experts(block, work) if has_experts(work) else block


def _entries_of_experts(work: Workload) -> Number:
    return where_experts(work, weights_of_experts(work) * work.model.sparse)


def _entries(work: Workload) -> tuple[Number, Number]:
    """Return the fields ``entries`` and ``attention_grads`` of ``BlockBytes``."""
    model, ranks = work.model, work.layout.x * work.layout.y
    of_mlp = model.mean_gate_up + model.mean_inner
    hidden = model.hidden_size / ranks
    out = np.where(model.linear == 1, model.linear_values, model.values)
    return work.block_weights / ranks, hidden * (of_mlp + out)


def _bytes_with_experts(block: BlockBytes, work: Workload) -> BlockBytes:
    """Return the bytes of a block that has experts in addition to an MLP (the shared expert) or instead of an MLP.

    The backward pass of a shared expert comes first. It frees the tensors that the shared expert has saved. The
    gradient of the shared expert's input stays in memory until the gradient of the experts' input is added to it.
    """
    p = tensor_bytes(work)
    freed = work.model.mlps * p.gathered + 2 * mlp_made_again(work) + kept_by_shared_gate(work)
    residual = p.residual + np.where(work.model.shared_expert_intermediate_size > 0, p.residual - freed, 0)
    sharded, replicated = (residual + of_experts for of_experts in backward_of_experts(work))
    of_shared = work.model.hidden_size * (work.model.mean_gate_up + work.model.mean_inner)
    of_shared = of_shared / (work.layout.x * work.layout.y)
    return replace(
        block,
        shared_grads=of_shared,
        summed_experts=residual - kept_by_experts(work, False),
        full=block.full + choices_kept(work),
        whole=block.whole + kept_by_experts(work, False),
        selective=block.selective + kept_by_experts(work, True),
        backward=np.maximum(block.backward, sharded),
        backward_replicated=np.maximum(block.backward_replicated, replicated),
        attention_backward=block.attention_backward - kept_by_experts(work, False),
        mlp_again=block.mlp_again + experts_made_again(work),
    )


def kept_by_micro_batch(work: Workload, layers: Number, block: BlockBytes) -> Number:
    """Return the bytes that the ``layers`` blocks of a rank save for the backward pass of a micro-batch."""
    stage = np.where(work.layout.pp > 1, work.program.stage_keeps, 0) * block.full
    return stage + kept_and_in_backward(work, layers, block)[0]


def kept_and_in_backward(
    work: Workload, layers: Number, block: BlockBytes, grads: Gradients = NO_GRADIENTS
) -> tuple[Number, Number]:
    """Return two numbers of bytes: what a rank's blocks save for a micro-batch, and the most that the backward pass of
    one block adds.

    During a block's backward pass, the category "weights" counts all gathered weights of the block. So the weights that
    the block already holds before this pass (``kept_weights``) are subtracted from the second number.
    """
    if block.dense is None:
        return block.kept(work, layers), block.in_backward(work, layers, grads) - kept_weights(work)[0]
    share = dense_share(work)
    dense, others = kinds_of_blocks(work)
    kept_by_others = (1 - share) * block.kept(work, layers)
    in_others = np.where(share < 1, block.in_backward(others, layers, grads) - kept_weights(others)[0], -np.inf)
    # The dense blocks come first in the model. When the backward pass reaches them, all other blocks have freed what
    # they had saved.
    of_dense = grads._replace(before=np.where(share < 1, grads.of_block * block.in_unit(others), grads.before))
    in_dense = block.dense.in_backward(dense, layers, of_dense) - kept_weights(dense)[0] - kept_by_others
    in_dense = np.where(share > 0, in_dense, -np.inf)
    return kept_by_others + share * block.dense.kept(work, layers), np.maximum(in_others, in_dense)
