"""Compute the bytes of one block's attention on one rank: the tensors that attention saves for the backward pass, and
the peak of attention's backward pass."""

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.linear_attention import GRADIENTS, has_linear, saved_by_core
from fourfold.planning.cost.tensor_sizes import (
    attention_over_y,
    capped_scores,
    caps_scores,
    copies_heads,
    flash_workspace,
    heads_on_rank,
    is_ring,
    log_sum_exp_bytes,
    mlp_made_again,
    tensor_bytes,
)
from fourfold.planning.workload import Workload


def kept_by_core(work: Workload) -> tuple[Number, Number]:
    """Return the bytes that attention saves for its backward pass: the tensors between the projections qkv and o_proj,
    except the attention kernel's output.

    Returns:
        First the bytes if attention is not recomputed, then the bytes if attention is recomputed. In the second case,
        attention saves only the outputs of the projections.
    """
    model, layout, step = work.model, work.layout, work.step
    p, split = tensor_bytes(work), attention_over_y(work)
    ranks = layout.x * np.where(split == "heads", layout.y, 1)
    # If attention runs in float32 or reads an explicit mask (see below), fourfold repeats each key-value head for all
    # query heads that share it.
    repeated = np.asarray(work.program.is_fourfold, bool) & (step.item_bytes == 4) & (model.keys != model.queries)
    gathered = repeated | (split == "sequence") | (model.keys % (ranks * model.head_dim) != 0)
    # The sum over y writes q, k, and v into one buffer, and attention saves v. Unless v is gathered or copied, it is a
    # view of the buffer, so the full buffer stays in memory.
    one_buffer = (layout.y > 1) & ~np.asarray(model.attention_bias, bool) & ~gathered & ~copies_heads(work)
    read = np.where(split == "sequence", p.whole_queries, np.where(repeated, p.queries, p.keys))
    gate = p.queries * model.output_gate
    qkv = p.queries + np.where(one_buffer, 2 * p.keys + model.rotated * (p.queries + read) + gate, 2 * read)
    # A norm of queries or keys saves two tensors. The first is its input in float32. The second is the normalized
    # values, in float32 if the norm multiplies by 1 + weight, and otherwise in the step's dtype. A norm over several
    # ranks is fourfold's own autograd function, and saves only its input, in the step's dtype.
    over_ranks = np.asarray(model.joint_head_norms, bool) & (layout.x * layout.y > 1)
    # Latent attention copies queries, keys, and values to join the channels of each head. It also saves its padded
    # output.
    qkv = np.where(model.has_latents, 2 * p.queries + 2 * p.keys, qkv)
    in_32 = 4 / step.item_bytes
    copies = np.where(over_ranks, 1, np.where(model.zero_centered_norm, in_32, 1) + in_32)
    normed = np.where(model.qk_norm, (p.queries + p.keys) * copies, 0)
    # Without a fused kernel, autograd saves 5 bytes per query-key pair: the outputs of softmax and dropout (2 + 2), and
    # the dropout mask (1).
    pairs = layout.micro_batch_size * step.seq_length**2 / layout.cp * heads_on_rank(work)
    scores = np.where(work.program.flash, 0, 5 * pairs)
    # If y splits the queries, a causal kernel does not know the positions of a rank's queries. So attention reads an
    # explicit mask from memory.
    mask = np.where(split == "sequence", step.item_bytes * step.seq_length**2 / layout.y, 0)
    arriving = step.item_bytes * work.tokens * (model.projected + model.shared_key) / (layout.x * layout.y)
    core = qkv + normed + log_sum_exp_bytes(work) + scores + mask + gate  # ``gate`` is the sigmoid of the output gate.
    # Linear attention is always recomputed.
    return np.where(model.linear == 1, arriving, core), arriving


def kept_latents(work: Workload, tokens: Number) -> Number:
    """Return how many more bytes latent attention saves for the backward pass than other kinds of attention save.

    Other kinds of attention save their input, which has ``tokens`` bytes. Instead of this input, latent attention saves
    the rank's shard of the input, the rank's latents, and the gathered latents.
    """
    model, layout = work.model, work.layout
    token = work.step.item_bytes * work.tokens / layout.y
    arrived = np.where(layout.y > 1, model.latents, model.q_latent + model.kv_latent) / layout.x
    statistics = 4 * work.tokens / layout.x * (1 + np.greater(model.q_latent, 0))
    return (
        model.read_by_heads / model.hidden_size * tokens
        - tokens
        + token * arrived
        + statistics
        + tensor_bytes(work).residual
    )


def attention_backward(work: Workload) -> Number:
    """Return the peak bytes of attention's backward pass, not counting the tensors that the forward pass has saved.

    The backward pass of the MLP comes first, and frees the tensors that the MLP has saved. So the bytes of these
    tensors are subtracted.
    """
    model, p = work.model, tensor_bytes(work)
    # In a ring, the rank sums gradients in fp32. It holds the gradients of its queries, of its own keys and values, and
    # of the keys and values that it currently passes on.
    passing = 4 / work.step.item_bytes * (p.queries + 4 * p.keys) + 2 * p.keys
    in_kernel = p.queries + 2 * p.keys + flash_workspace(work) + np.where(is_ring(work), passing, 0)
    held = p.queries * (1 + model.output_gate) + np.where(caps_scores(work), _capped_backward(work), in_kernel)
    if has_linear(work):
        held = np.where(model.linear == 1, p.queries + saved_by_core(work) + GRADIENTS.of(work), held)
    # By now, the inputs of the MLP's norms and of attention's output norm have been freed too. With deferred weight
    # gradients, nothing has been freed, because these gradients still need the tensors.
    norms = (model.norms / 2 + np.asarray(model.output_norms, bool)) * p.residual
    freed = np.where(work.layout.split_backward, 0, p.gathered + norms + 2 * mlp_made_again(work))
    return p.residual + held - freed


def _capped_backward(work: Workload) -> Number:
    """Return the bytes that the backward pass of attention with soft-capped scores needs, instead of the bytes that a
    fused kernel needs.

    At the peak, five fp32 tensors have an entry per score: the softmax weight, the derivative of the soft-cap, the
    soft-capped value, the gradient of the softmax weight, and a result computed from that gradient. Keys, values, and
    their gradients are expanded to all query heads. The gradients of queries, keys, and values are summed in fp32.
    """
    item, p, scores = work.step.item_bytes, tensor_bytes(work), capped_scores(work)
    of_heads = scores.heads * scores.keys * work.model.head_dim * (2 * item + 2 * 4)
    sums = 4 / item * (p.queries + 2 * p.keys)
    return 20 * scores.heads * scores.queries * scores.keys + of_heads + sums
