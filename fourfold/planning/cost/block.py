"""Seconds of one block and of the head for one micro-batch: computation, and communication over x and y."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planning.cases import Cases, Number
from fourfold.planning.cost.activations import attention_over_y, heads_here
from fourfold.planning.cost.terms import attention_core, host, pointwise
from fourfold.planning.cost.terms.collective import Group, gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.matmul import matmul_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import CP_METHODS, Workload


@dataclass(frozen=True)
class BlockTime(Cases):
    """Seconds of one block (head: of the head), of one micro-batch. They depend on x, y, cp and the micro-batch alone.

    forward, backward: computation; attention_forward, activation_forward, x_again, y_again: the parts that selective
    recompute repeats; last_product, last_sum: those at the end, which full recompute skips; hideable_x, hideable_y:
    collectives of the backward that can run during ``weight_gradients``; gate_sum, up_sum, qkv_sum: sums over y of
    gate, of gate and up, and of queries, keys and values; up_product: the product that can hide that of gate;
    launch_forward, launch_backward: host seconds.
    """

    forward: Number
    backward: Number
    attention_forward: Number
    activation_forward: Number
    last_product: Number
    last_sum: Number
    x_again: Number
    y_again: Number
    x_forward: Number
    x_backward: Number
    y_forward: Number
    y_backward: Number
    hideable_x: Number
    hideable_y: Number
    gate_sum: Number
    up_sum: Number
    qkv_sum: Number
    up_product: Number
    weight_gradients: Number
    launch_forward: Number
    launch_backward: Number
    head: Number
    head_x: Number
    head_y: Number
    embedding: Number


class Rates:
    """Rates of a machine under a program."""

    def __init__(self, work: Workload, machine: Machine, constants: Constants) -> None:
        step = work.step
        rate = np.where(step.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, machine.achieved)
        # Relative to the peak: a faster achieved rate of 16 bits must not slow 32 bits.
        self.attention = constants.attention * np.where(
            step.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch


def block_time(work: Workload, machine: Machine, constants: Constants) -> BlockTime:
    """Seconds for each case of ``work``."""
    parts = work.parts
    part = work.but(micro_batch=work.layout.micro_batch / parts)
    model, layout = work.model, work.layout
    rates = Rates(work, machine, constants)
    x_group = group_of(layout.x, 1, machine, constants)
    y_group = group_of(layout.y, layout.x, machine, constants)
    forward, input_gradients, weight_gradients = _products(part, rates)
    attend, attend_backward = _attention(part, rates, machine)
    pointwise_forward, pointwise_backward = (size / parts / rates.bandwidth for size in pointwise_traffic(work))
    x_forward, x_backward, hideable_x = _over_x(part, x_group)
    y_forward, y_backward, hideable_y = _over_y(part, y_group)
    launch_forward, launch_backward = _launches(part, rates)
    weights = model.block_weights / (layout.x * layout.y)
    added = 3 * work.step.item_bytes * weights * (1 - 1 / parts) / rates.bandwidth  # the parts' weight gradients
    seconds: dict[str, Number] = {
        "forward": forward + attend + pointwise_forward,
        "backward": input_gradients + weight_gradients + attend_backward + pointwise_backward + added,
        "attention_forward": attend,
        "activation_forward": _activation(part, rates),
        "last_product": _linear(part, rates, rates.matmul, model.inner / layout.x, model.hidden / layout.y)[0],
        "last_sum": x_forward / 4,
        "x_again": x_forward / 2,
        "y_again": gather_seconds(part.step.item_bytes * part.tokens * model.queries / layout.x, 1, y_group),
        "x_forward": x_forward,
        "x_backward": x_backward,
        "y_forward": y_forward,
        "y_backward": y_backward,
        "hideable_x": hideable_x,
        "hideable_y": hideable_y,
        "gate_sum": _gate_sum(part, y_group),
        "qkv_sum": gather_seconds(
            part.step.item_bytes * part.tokens * (model.queries + 2 * model.keys) / layout.x, 1, y_group
        ),
        "up_sum": reduce_seconds(part.step.item_bytes * part.tokens * model.gate_up / layout.x, 1, y_group),
        "up_product": _linear(part, rates, rates.matmul, model.hidden / layout.y, model.inner / layout.x)[0],
        "weight_gradients": weight_gradients,
        "launch_forward": launch_forward,
        "launch_backward": launch_backward,
    }
    head, head_x, head_y, embedding = _head(work, rates, x_group, y_group)
    ends = {"head": head, "head_x": head_x, "head_y": head_y, "embedding": embedding}
    return BlockTime(**{name: parts * of_part for name, of_part in seconds.items()}, **ends)


def _launches(work: Workload, rates: Rates) -> tuple[Number, Number]:
    """Host seconds of the forward and of the backward."""
    collectives = 4 * (work.layout.x > 1) + 5 * (work.layout.y > 1)
    more = np.where(_softmax_is_plain(work), attention_core.PLAIN_KERNELS, 0.0)
    fused = work.program.fused
    forward = rates.launch * (host.block_launches(host.FORWARD_KERNELS, fused, collectives) + more)
    return forward, rates.launch * (host.block_launches(host.BACKWARD_KERNELS, fused, collectives) + more)


def _products(work: Workload, rates: Rates) -> tuple[Number, Number, Number]:
    """Forward, input gradients, weight gradients of the four linear layers (q, k, v in one; gate and up in one)."""
    model, layout = work.model, work.layout
    shapes = (
        (model.hidden / layout.y, (model.queries + 2 * model.keys) / layout.x),
        (model.queries / layout.x, model.hidden / layout.y),
        (model.hidden / layout.y, model.gate_up / layout.x),
        (model.inner / layout.x, model.hidden / layout.y),
    )
    each = [_linear(work, rates, rates.matmul, inner, out) for inner, out in shapes]
    forward, inputs, weights = (sum(parts) for parts in zip(*each, strict=True))
    return forward, inputs, weights


def _linear(work: Workload, rates: Rates, rate: Number, inner: Number, out: Number) -> tuple[Number, Number, Number]:
    """Seconds of outputs, input gradient and weight gradient of one linear layer; rate: for the best operand layout."""
    tokens, how = work.tokens, {"units": rates.units, "bandwidth": rates.bandwidth, "item": work.step.item_bytes}
    return (
        matmul_seconds(tokens, out, inner, rate=rates.nt * rate, **how),
        matmul_seconds(tokens, inner, out, rate=rates.nn * rate, **how),
        matmul_seconds(out, inner, tokens, rate=rates.tn * rate, **how),
    )


def _attention(work: Workload, rates: Rates, machine: Machine) -> tuple[Number, Number]:
    """Forward and backward of the attention core; each rank has its share of heads (or sequences, or queries)."""
    model, layout, step, program = work.model, work.layout, work.step, work.program
    scores = (
        layout.micro_batch * step.seq * step.seq * model.queries / model.head_dim / (layout.x * layout.y * layout.cp)
    )
    flops = 4 * scores * model.head_dim / 2
    flash = attention_core.flash_seconds(
        flops, step.seq, model.head_dim, rate=rates.attention, kernel=_kernel(work, machine)
    )
    how = {"rate": rates.matmul, "bandwidth": rates.bandwidth}
    plain = _softmax_is_plain(work)
    moved = np.where(plain, attention_core.PLAIN_FORWARD, attention_core.UNFUSED_FORWARD)
    moved_back = np.where(plain, attention_core.PLAIN_BACKWARD, attention_core.UNFUSED_BACKWARD)
    forward = attention_core.unfused_seconds(scores, model.head_dim, **how, moved_per_score=moved)
    backward = attention_core.unfused_seconds(2 * scores, model.head_dim, **how, moved_per_score=moved_back / 2)
    return (
        np.where(program.flash, flash, forward),
        np.where(program.flash, attention_core.BACKWARD * flash, backward),
    )


def _kernel(work: Workload, machine: Machine) -> attention_core.Kernel:
    """The fused attention kernel of a program: the machine's fastest, or FlashAttention-2."""
    layout, program = work.layout, work.program
    # fourfold's ring needs the softmax's sums, which only FlashAttention-2's kernel returns.
    ring = program.is_fourfold & (layout.cp > 1) & np.equal(layout.cp_method, CP_METHODS.index("ring"))
    faster = np.asarray(machine.flash2) > 0
    newest = faster & ~np.asarray(program.flash2 | ring, bool)
    return attention_core.Kernel(
        share=np.where(faster & ~newest, machine.flash2 / machine.attention, 1.0),
        half=np.where(faster & ~newest, machine.flash2_half, machine.attention_half),
        narrow=np.where(newest, attention_core.NARROW, attention_core.NARROW_FLASH2),
    )


def _softmax_is_plain(work: Workload) -> Number:
    """An unfused attention falls back to single operations."""
    unfused = ~np.asarray(work.program.flash, bool)
    return unfused & (work.layout.micro_batch * heads_here(work) % attention_core.FUSED_HEADS != 0)


def pointwise_traffic(work: Workload) -> tuple[Number, Number]:
    """Bytes that one block moves besides its products and its attention, in the forward and in the backward."""
    model, layout, program = work.model, work.layout, work.program
    token, gated = work.step.item_bytes * work.tokens, model.gate_up > model.inner
    residual = token * model.hidden / (layout.y * np.where(program.split_residual, layout.x, 1))
    heads = token * (model.queries + 2 * model.keys) / (layout.x * layout.y)
    inner = token * model.inner / layout.x
    apart = np.where(layout.x * layout.y > 1, 2 * residual, 0)  # of sums over x, which a product cannot fuse
    biased = np.where(model.biases, heads + np.where(gated, 0, inner + apart), 0)
    both = token * (model.queries + model.keys) / (layout.x * layout.y)
    turned = np.where(model.rope, both * model.rotary_share, 0)
    others = pointwise.others_bytes(residual, heads, turned, inner, gated, program.fused)
    fused = np.asarray(program.fused, bool)
    own = pointwise.own_bytes(
        residual, turned, np.where(model.head_norms, both, 0), biased, inner, gated=gated, fused=fused,
        core_fused=fused & (layout.cp == 1), chains=(layout.y > 1) | model.zero_centered, layer_norm=model.layer_norm,
    )  # fmt: skip
    is_own = np.asarray(program.is_fourfold, bool)
    forward, backward = (
        np.where(is_own, ours + copied, theirs) for ours, copied, theirs in zip(own, _copied(work), others, strict=True)
    )
    return forward, backward


def _copied(work: Workload) -> tuple[Number, Number]:
    """Bytes that fourfold copies to lay out tensors before and after collectives, in the forward and the backward.

    Over x, if there are several sequences, what attention reads and writes, since a rank's parts of them are not
    contiguous; where y shares sequences or queries, the residual stream before and after. Over y features, which are
    also packed into one collective. Parts of a micro-batch are joined; tokens also before the attention, after which
    they are parted again.
    """
    model, layout = work.model, work.layout
    token = work.step.item_bytes * work.tokens
    qkv, queries = token * (model.queries + 2 * model.keys) / layout.x, token * model.queries / layout.x
    of_heads = attention_over_y(work) == "heads"
    joined = np.where(of_heads, 2 * (qkv + queries) / layout.y, 4 * token * model.hidden / layout.y)
    over_x = np.where((layout.x > 1) & (work.together > 1), joined, 0)
    over_y = np.where(layout.y > 1, 4 * qkv + 2 * queries, 0)
    over_y_back = np.where(layout.y > 1, 2 * qkv * (1 + 1 / layout.y) + 2 * queries, 0)
    parts = np.where(work.parts > 1, 2 * token * model.hidden / (layout.x * layout.y), 0)
    around = np.where(work.parts_are_tokens, 2 * (qkv + queries) / layout.y, 0)
    return over_x + over_y + parts + around, over_x + over_y_back + parts + around


def _activation(work: Workload, rates: Rates) -> Number:
    """Seconds of the MLP's activation, which reads gate and up, and writes the input of down_proj."""
    model = work.model
    return work.step.item_bytes * work.tokens * (model.gate_up + model.inner) / work.layout.x / rates.bandwidth


def _over_x(work: Workload, group: Group) -> tuple[Number, Number, Number]:
    """Forward, backward, and the part of the backward that can run during weight gradients."""
    residual = work.step.item_bytes * work.tokens * work.model.hidden / work.layout.y
    one = gather_seconds(residual, 1, group)
    again = np.where(work.program.regather, 2 * one, 0.0)
    return 4 * one, 4 * one + again, 2 * one + again


def _over_y(work: Workload, group: Group) -> tuple[Number, Number, Number]:
    model, layout = work.model, work.layout
    item = work.step.item_bytes * work.tokens / layout.x
    qkv, queries = model.queries + 2 * model.keys, model.queries
    statistics = reduce_seconds(4 * work.tokens / layout.x, 1, group)
    sums = np.where(work.program.is_fourfold, model.gate_up / model.inner, 1)
    forward = gather_seconds(item * (qkv + queries), 2, group) + reduce_seconds(item * model.gate_up, sums, group)
    hideable = reduce_seconds(item * model.inner, 1, group) + gather_seconds(item * queries, 1, group)
    return forward + 2 * statistics, hideable + gather_seconds(item * qkv, 1, group) + 2 * statistics, hideable


def _gate_sum(work: Workload, group: Group) -> Number:
    """Seconds of the sum of gate over y."""
    model = work.model
    return np.where(
        model.gate_up > model.inner,
        reduce_seconds(work.step.item_bytes * work.tokens * model.inner / work.layout.x, 1, group),
        0,
    )


def _head(work: Workload, rates: Rates, x_group: Group, y_group: Group) -> tuple[Number, Number, Number, Number]:
    """Seconds of head and loss, forward and backward: computation, over x, over y; and of the embedding."""
    model, layout, step = work.model, work.layout, work.step
    tokens, columns, hidden = work.tokens, model.vocab / layout.x, model.hidden / layout.y
    products = sum(_linear(work, rates, rates.head, hidden, columns))
    # Logits in 16 and in 32 bits, written and read by softmax, loss and gradient.
    loss = tokens / layout.y * columns * (2 * step.item_bytes + 20) / rates.bandwidth
    residual = step.item_bytes * tokens * hidden
    over_x = gather_seconds(2 * residual, 2, x_group)
    over_y = gather_seconds(2 * step.item_bytes * tokens * columns, 2, y_group)
    embedding = 6 * residual / rates.bandwidth + gather_seconds(2 * residual, 2, x_group)
    return products + loss, over_x, over_y, embedding
