"""Compute the time of one block and of the head for one micro-batch, split into computation and communication over the
tensor axes x and y."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Number
from fourfold.planning.cost import linear_attention
from fourfold.planning.cost.attention_time import attention_seconds, softmax_is_plain
from fourfold.planning.cost.expert_sizes import has_experts
from fourfold.planning.cost.expert_time import ExpertTime, expert_time
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.tensor_sizes import attention_over_y, capped_scores, caps_scores
from fourfold.planning.cost.terms import attention_core, host, pointwise
from fourfold.planning.cost.terms.collective import RankGroup, gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.matmul import linear_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.workload import Workload


@dataclass(frozen=True)
class BlockTime(ArrayFields):
    """Seconds of one block, or of the head, for one micro-batch. Among the layouts of one search, these seconds depend
    only on the fields of ``fastest.BLOCK_KEY``.

    - forward, backward: computation in the forward and in the backward pass.
    - x_forward, x_backward, y_forward, y_backward: communication over x and y, if nothing hides it.
    - attention_forward, activation_forward: computation of the attention core and of the MLP's activation. Selective
      recompute can repeat both.
    - x_again, y_again, norms_again: all-gathers over x, all-gathers over y, and sums over y for norms. Selective
      recompute can repeat them.
    - last_matmul, last_sum: the block's last matmul, and the sum of its result over x. Full recompute can skip both.
    - weight_gradients: the part of ``backward`` that computes weight gradients.
    - hideable_x, hideable_y: collectives over x and y that can run while weight gradients are computed.
    - gate_sum, up_matmul: the sum of gate over y, and the matmul of up, which can hide this sum.
    - launch_forward, launch_backward: host time to launch kernels, without the kernels of experts.
    - head, head_x, head_y: computation, communication over x, and communication over y of head and loss, in both
      passes.
    - embedding: computation and communication of the embedding, in both passes.
    - linear_forward, linear_launch: computation and host time of linear attention's core, which is always recomputed.
    - experts: times of the experts. The fields above include them, except the exchanges over ep and the launches.
    """

    forward: Number
    backward: Number
    attention_forward: Number
    activation_forward: Number
    last_matmul: Number
    last_sum: Number
    x_again: Number
    y_again: Number
    norms_again: Number
    x_forward: Number
    x_backward: Number
    y_forward: Number
    y_backward: Number
    hideable_x: Number
    hideable_y: Number
    gate_sum: Number
    up_matmul: Number
    weight_gradients: Number
    launch_forward: Number
    launch_backward: Number
    head: Number
    head_x: Number
    head_y: Number
    embedding: Number
    linear_forward: Number = 0.0
    linear_launch: Number = 0.0
    experts: ExpertTime = field(default_factory=ExpertTime)


def block_time(work: Workload, machine: Machine, constants: Constants) -> BlockTime:
    """Return the times of a block and of the head for each case. If some blocks have linear attention, the times are
    means over all blocks."""
    if not linear_attention.has_linear(work):
        return _time_of_one_kind(work, machine, constants)
    softmax, linear = (
        _time_of_one_kind(kind, machine, constants) for kind in linear_attention.kinds_of_attention(work)
    )
    means: dict[str, Any] = {
        name: linear_attention.mean_of_kinds(work, time, getattr(linear, name))
        for name, time in vars(softmax).items()
        if name != "experts"
    }
    return replace(softmax, **means)


def _time_of_one_kind(work: Workload, machine: Machine, constants: Constants) -> BlockTime:
    parts = work.active_parts
    part = work.but(micro_batch_size=work.layout.micro_batch_size / parts)
    model, layout = work.model, work.layout
    rates, item = Rates(work, machine, constants), work.step.item_bytes
    x_group = group_of(layout.x, 1, machine, constants)
    y_group = group_of(layout.y, layout.x, machine, constants)
    forward, input_gradients, weight_gradients = _matmuls(part, rates)
    attend, attend_backward = attention_seconds(part, rates, machine)
    mixed, mixed_backward = linear_attention.core_seconds(part, rates)
    pointwise_forward, pointwise_backward = (size / parts / rates.bandwidth for size in pointwise_traffic(work))
    x_forward, x_backward, hideable_x = _over_x(part, x_group)
    y_forward, y_backward, hideable_y = _over_y(part, y_group)
    launch_forward, launch_backward = _launches(part, rates)
    weights = work.block_weights / (layout.x * layout.y)
    hidden, inner = model.hidden_size / layout.y, model.mean_inner / layout.x
    up, *_ = linear_seconds(part.tokens, hidden, inner, item, rates, rates.matmul)
    down, *_ = linear_seconds(part.tokens, inner, hidden, item, rates, rates.matmul)
    # The first batch part only writes weight gradients. Each further part reads them, adds its own, and writes the sum.
    added = 3 * item * weights * (1 - 1 / parts) / rates.bandwidth
    seconds: dict[str, Number] = {
        "forward": forward + attend + mixed + pointwise_forward,
        "backward": input_gradients + weight_gradients + attend_backward + mixed_backward + pointwise_backward + added,
        "attention_forward": attend,
        "activation_forward": _activation(part, rates),
        # An output norm reads the last matmul's sum over x, so recompute cannot skip this matmul and this sum.
        "last_matmul": np.where(model.output_norms, 0, down),
        "last_sum": np.where(model.output_norms, 0, x_forward / (_gathers(model) + 1 + model.mlps)),
        "x_again": x_forward * _gathers(model) / (_gathers(model) + 1 + model.mlps),
        "y_again": gather_seconds(part.step.item_bytes * part.tokens * model.values / layout.x, 1, y_group),
        "norms_again": norms_before(model) * norm_seconds(part, y_group),
        "x_forward": x_forward, "x_backward": x_backward, "y_forward": y_forward, "y_backward": y_backward,
        "hideable_x": hideable_x, "hideable_y": hideable_y, "gate_sum": _gate_sum(part, y_group), "up_matmul": up,
        "weight_gradients": weight_gradients, "launch_forward": launch_forward, "launch_backward": launch_backward,
        "linear_forward": mixed, "linear_launch": rates.launch * linear_attention.core_launches(part)[0],
    }  # fmt: skip
    head, head_x, head_y, embedding = _head(work, rates, x_group, y_group)
    of_all: dict[str, Any] = {name: parts * of_part for name, of_part in seconds.items()}
    block = BlockTime(**of_all, head=head, head_x=head_x, head_y=head_y, embedding=embedding)
    return _time_with_experts(block, work, machine, constants, rates) if has_experts(work) else block


def _time_with_experts(
    block: BlockTime, work: Workload, machine: Machine, constants: Constants, rates: Rates
) -> BlockTime:
    """Return the time of a block with experts, either in addition to an MLP (shared expert) or instead of an MLP.

    Full recompute also repeats the experts' last matmuls and sums over x, because the gradients of the routing weights
    read the results.
    """
    model, more = work.model, expert_time(work, machine, constants, rates)
    last = 1 - model.sparse
    # Seconds of one collective over x, for a tensor as large as the residual stream.
    one = block.x_forward / (_gathers(model) + 1 + model.mlps)
    return replace(
        block,
        forward=block.forward + more.forward,
        backward=block.backward + more.backward,
        activation_forward=block.activation_forward + more.activation,
        last_matmul=last * block.last_matmul,
        last_sum=last * one,
        x_again=_gathers(model) * one + more.x / 2,
        x_forward=block.x_forward + more.x,
        x_backward=block.x_backward + more.x_backward,
        y_forward=block.y_forward + more.y,
        y_backward=block.y_backward + more.y_backward,
        experts=more,
        weight_gradients=block.weight_gradients + more.weight_gradients,
    )


def _launches(work: Workload, rates: Rates) -> tuple[Number, Number]:
    """Return the seconds that the host needs to launch a block's kernels in the forward and in the backward pass,
    without the kernels of experts."""
    collectives = 4 * (work.layout.x > 1) + 5 * (work.layout.y > 1)
    plain = np.where(softmax_is_plain(work), attention_core.PLAIN_KERNELS, 0.0)
    fused, third = work.program.fused, work.program.host_operations / 3
    more, more_back = plain + third, plain + 2 * third
    if np.any(caps_scores(work)):
        pieces = np.where(caps_scores(work), capped_scores(work).pieces, 0.0)
        more = more + pieces * attention_core.CAPPED_KERNELS
        more_back = more_back + pieces * attention_core.CAPPED_KERNELS_BACKWARD
    of_core, of_core_back = linear_attention.core_launches(work)
    more, more_back = more + of_core, more_back + of_core_back
    forward = rates.launch * (host.block_launches(host.FORWARD_KERNELS, fused, collectives) + more)
    return forward, rates.launch * (host.block_launches(host.BACKWARD_KERNELS, fused, collectives) + more_back)


def _matmuls(work: Workload, rates: Rates) -> tuple[Number, Number, Number]:
    """Return the seconds of a block's linear layers: the forward pass, the input gradients, and the weight gradients.
    The matmuls of q, k, and v are joined, and so are the matmuls of gate and up.

    In latent attention, two layers replace the layer for q, k, and v. The first projects a rank's own tokens to
    latents, and the second projects latents to heads. The matrices of the second layer have different input widths, so
    their mean width is used, which gives the exact FLOPs.
    """
    model, layout = work.model, work.layout
    mlps, mlp = model.mlps, np.maximum(model.mlps, 1e-30)  # Avoid a division by 0.
    to_heads = model.attention_weights - model.hidden_size * (model.latents + model.values)
    shapes = (
        (to_heads / model.projected / layout.y, model.projected / layout.x, 1),
        (model.values / layout.x, model.hidden_size / layout.y, 1),
        (model.hidden_size / layout.y, np.maximum(model.latents, 1) / layout.x, np.where(model.has_latents, 1.0, 0.0)),
        (model.hidden_size / layout.y, model.mean_gate_up / mlp / layout.x, mlps),
        (model.mean_inner / mlp / layout.x, model.hidden_size / layout.y, mlps),
    )
    item = work.step.item_bytes
    each = [linear_seconds(work.tokens, inner, out, item, rates, rates.matmul, share) for inner, out, share in shapes]
    forward, inputs, weights = (sum(parts) for parts in zip(*each, strict=True))
    return forward, inputs, weights


def pointwise_traffic(work: Workload) -> tuple[Number, Number]:
    """Return the bytes that one block moves in forward and backward outside its matmuls and its attention core."""
    model, layout, program = work.model, work.layout, work.program
    token, gated = work.step.item_bytes * work.tokens, model.mean_gate_up > model.mean_inner
    residual = token * model.hidden_size / (layout.y * np.where(program.split_residual, layout.x, 1))
    heads = token * model.projected / (layout.x * layout.y)
    inner = token * model.mean_inner / layout.x
    # If x or y splits the layers, biases are added only after the sum over ranks.
    apart = np.where(layout.x * layout.y > 1, 2 * residual, 0)
    biased = np.where(model.attention_bias, heads + np.where(gated, 0, inner + apart), 0)
    both = token * (model.queries + model.keys) / (layout.x * layout.y)
    joined = np.where(model.has_latents, 2 * (2 * both + heads), 0)
    # Softmax attention multiplies its output by a gate. Linear attention has this gate inside its core.
    gated_outputs = np.where(model.linear == 1, 0, token * model.queries * model.output_gate / (layout.x * layout.y))
    turned = both * model.rotary_share * model.rotated
    others = pointwise.others_bytes(residual, heads, turned, inner, gated, program.fused)
    fused = np.asarray(program.fused, bool)
    own = pointwise.own_bytes(
        residual, turned, np.where(model.qk_norm, both, 0), biased, inner, gated=gated, fused=fused,
        core_fused=fused & (layout.cp == 1), chains=(layout.y > 1) | model.zero_centered_norm,
        layer_norm=model.layer_norm,
    )  # fmt: skip
    is_own = np.asarray(program.is_fourfold, bool)
    forward, backward = (
        np.where(is_own, ours + copied, theirs) + joined + gates * gated_outputs
        for ours, copied, theirs, gates in zip(own, _copied(work), others, (5, 8), strict=True)
    )
    return forward, backward


def _copied(work: Workload) -> tuple[Number, Number]:
    """Return the bytes that fourfold copies in forward and backward, because collectives need another memory layout.

    - With x > 1 and several sequences, the tokens of a sequence are not contiguous on a rank, so the inputs and outputs
      of attention are copied. If the y ranks divide sequences or queries among themselves, the residual stream is
      copied before and after attention instead.
    - With y > 1, features are copied into one buffer for one collective.
    - The outputs of batch parts are joined. If each part holds tokens of all sequences, the parts are also joined
      before attention and split after it.
    """
    model, layout = work.model, work.layout
    token = work.step.item_bytes * work.tokens
    qkv, queries = token * model.projected / layout.x, token * model.values / layout.x
    of_heads = attention_over_y(work) == "heads"
    joined = np.where(of_heads, 2 * (qkv + queries) / layout.y, 4 * token * model.hidden_size / layout.y)
    over_x = np.where((layout.x > 1) & (work.sequences_per_part > 1), joined, 0)
    over_y = np.where(layout.y > 1, 4 * qkv + 2 * queries, 0)
    over_y_back = np.where(layout.y > 1, 2 * qkv * (1 + 1 / layout.y) + 2 * queries, 0)
    parts = np.where(work.active_parts > 1, 2 * token * model.hidden_size / (layout.x * layout.y), 0)
    around = np.where(work.parts_are_tokens, 2 * (qkv + queries) / layout.y, 0)
    return over_x + over_y + parts + around, over_x + over_y_back + parts + around


def _activation(work: Workload, rates: Rates) -> Number:
    """Return the seconds of the MLP's activation. It reads gate and up, and writes the input of down_proj."""
    model = work.model
    token = work.step.item_bytes * work.tokens
    return token * (model.mean_gate_up + model.mean_inner) / work.layout.x / rates.bandwidth


def _over_x(work: Workload, group: RankGroup) -> tuple[Number, Number, Number]:
    """Return three numbers of seconds for communication over x: in the forward pass, in the backward pass, and the part
    of the backward pass that can overlap with the computation of weight gradients."""
    residual = work.step.item_bytes * work.tokens * work.model.hidden_size / work.layout.y
    one = gather_seconds(residual, 1, group)
    gathers = _gathers(work.model) * one
    again = np.where(work.program.regather, gathers, 0.0)
    every = gathers + (1 + work.model.mlps) * one
    return every, every + again, gathers + again


def _gathers(model: ModelShape) -> Number:
    """Return how many tensors as large as the residual stream a block gathers over x in its forward pass.

    With latent attention, the block gathers latents instead of hidden states, so the number can be a fraction.
    """
    return model.read_by_heads / model.hidden_size + model.mlps


def _over_y(work: Workload, group: RankGroup) -> tuple[Number, Number, Number]:
    """Return three numbers of seconds for communication over y: in the forward pass, in the backward pass, and the part
    of the backward pass that can overlap with the computation of weight gradients."""
    model, layout = work.model, work.layout
    item = work.step.item_bytes * work.tokens / layout.x
    qkv, queries = model.projected + model.latents, model.values
    statistics = model.norms / 2 * norm_seconds(work, group)
    sums = np.where(work.program.is_fourfold, model.mean_gate_up / np.maximum(model.mean_inner, 1), model.mlps)
    forward = gather_seconds(item * (qkv + queries), 2, group) + reduce_seconds(item * model.mean_gate_up, sums, group)
    hideable = reduce_seconds(item * model.mean_inner, model.mlps, group) + gather_seconds(item * queries, 1, group)
    others = 2 * statistics + whole_keys_seconds(work, group)
    return forward + others, hideable + gather_seconds(item * qkv, 1, group) + others, hideable


def norm_seconds(work: Workload, group: RankGroup) -> Number:
    """Return the seconds to sum a norm's statistics over y."""
    return reduce_seconds(4 * work.tokens / work.layout.x, 1, group)


def norms_before(model: ModelShape) -> Number:
    """Return the number of norms on the inputs of attention and MLP."""
    return np.where(model.output_norms, np.maximum(model.norms - 2, 0), 2)


def whole_keys_seconds(work: Workload, group: RankGroup) -> Number:
    """Return the seconds to gather keys and values over y, or to sum their gradients, if the y ranks divide the queries
    of a sequence. Return 0 otherwise."""
    split = np.asarray(work.program.is_fourfold, bool) & (attention_over_y(work) == "sequence")
    size = 2 * work.step.item_bytes * work.tokens * work.model.keys / work.layout.x
    return np.where(split, gather_seconds(size, 1, group), 0.0)


def _gate_sum(work: Workload, group: RankGroup) -> Number:
    """Return the seconds of the sum of gate over y, or 0 if the MLP has no gate."""
    model = work.model
    gate = work.step.item_bytes * work.tokens * model.mean_inner / work.layout.x
    return np.where(model.mean_gate_up > model.mean_inner, reduce_seconds(gate, 1, group), 0)


def _head(
    work: Workload, rates: Rates, x_group: RankGroup, y_group: RankGroup
) -> tuple[Number, Number, Number, Number]:
    """Return four numbers of seconds for both passes: computation, communication over x, and communication over y of
    head and loss, and the total time of the embedding. The first three numbers include the prediction layers' calls of
    the head, and their projections."""
    model, layout, step = work.model, work.layout, work.step
    tokens, columns, hidden = work.tokens, model.padded_vocab_size / layout.x, model.hidden_size / layout.y
    matmuls = sum(linear_seconds(tokens, hidden, columns, step.item_bytes, rates, rates.head))
    # fourfold's kernels read the 16-bit logits twice, and once overwrite them with the gradient. Other frameworks read
    # and write logits in 16 and in 32 bits, for softmax, loss, and gradient.
    is_ours = np.logical_and(work.program.is_fourfold, work.program.fused_loss)
    moved = np.where(is_ours, 3 * step.item_bytes, 2 * step.item_bytes + 20)
    loss = tokens / layout.y * columns * moved / rates.bandwidth
    residual = step.item_bytes * tokens * hidden
    over_x = gather_seconds(2 * residual, 2, x_group)
    over_y = gather_seconds(2 * step.item_bytes * tokens * columns, 2, y_group)
    embedding = 6 * residual / rates.bandwidth + gather_seconds(2 * residual, 2, x_group)
    calls = 1 + model.predictions
    # Each prediction layer also looks up tokens in the embedding, and sums the outputs of its projections over y.
    over_x = calls * over_x + model.predictions * gather_seconds(2 * residual, 2, x_group)
    summed = gather_seconds(2 * residual * layout.y / layout.x, 2, y_group)
    return (
        (calls + model.projections_per_head) * matmuls + calls * loss,
        over_x,
        calls * over_y + model.predictions * summed,
        embedding,
    )
