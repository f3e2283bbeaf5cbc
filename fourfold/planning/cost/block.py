"""Seconds of one block and of the head for one micro-batch: what they compute, and what they send over x, y and cp."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.planning.cases import Cases, Number
from fourfold.planning.cost.terms import attention_core, host, pointwise
from fourfold.planning.cost.terms.collective import Group, gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.matmul import matmul_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


@dataclass(frozen=True)
class BlockTime(Cases):
    """Seconds of one block (head: of the head), of one micro-batch. They depend on x, y, cp and the micro-batch alone.

    compute, over_x, over_y: forward and backward; attention_forward, activation_forward, x_again, y_again: the parts
    that selective recompute repeats; last_product, last_sum: those at the end, which full recompute need not;
    hideable_x, hideable_y: collectives of the backward that can run while the weight gradient is computed, and the
    computation there is for that; gate_sum, up_product: the sum of gate over y, and what it may run behind;
    launches_forward, launches_backward: host seconds.
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
        rate = np.where(work.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(work.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(work.bits == 32, machine.achieved_fp32, machine.achieved)
        # Of the peak, for a faster product of 16 bits must not slow one of 32.
        self.attention = constants.attention * np.where(
            work.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch


def block_time(work: Workload, machine: Machine, constants: Constants) -> BlockTime:
    """Of each case of ``work``."""
    rates = Rates(work, machine, constants)
    x_group = group_of(work.x, 1, machine, constants)
    y_group = group_of(work.y, work.x, machine, constants)
    forward, input_gradients, weight_gradients = _products(work, rates)
    attend, attend_backward = _attention(work, rates)
    pointwise_forward, pointwise_backward = (size / rates.bandwidth for size in pointwise_traffic(work))
    x_forward, x_backward, hideable_x = _over_x(work, x_group)
    y_forward, y_backward, hideable_y = _over_y(work, y_group)
    collectives = 4 * (work.x > 1) + 5 * (work.y > 1)
    none = np.zeros(())
    more = np.where(_softmax_is_plain(work), attention_core.PLAIN_KERNELS, 0.0)
    head, head_x, head_y, embedding = _head(work, rates, x_group, y_group)
    return BlockTime(
        forward=forward + attend + pointwise_forward,
        backward=input_gradients + weight_gradients + attend_backward + pointwise_backward,
        attention_forward=attend,
        activation_forward=_activation(work, rates),
        last_product=_linear(work, rates, rates.matmul, work.inner / work.x, work.hidden / work.y)[0],
        last_sum=x_forward / 4,
        x_again=x_forward / 2,
        y_again=gather_seconds(work.bytes * work.tokens * work.queries / work.x, 1, y_group),
        x_forward=x_forward,
        x_backward=x_backward,
        y_forward=y_forward,
        y_backward=y_backward,
        hideable_x=hideable_x,
        hideable_y=hideable_y,
        gate_sum=_gate_sum(work, y_group),
        up_product=_linear(work, rates, rates.matmul, work.hidden / work.y, work.inner / work.x)[0],
        weight_gradients=weight_gradients,
        launch_forward=rates.launch * (host.block_launches(False, none, work.fused, collectives) + more),
        launch_backward=rates.launch * (host.block_launches(True, none, work.fused, collectives) + more),
        head=head,
        head_x=head_x,
        head_y=head_y,
        embedding=embedding,
    )


def _products(work: Workload, rates: Rates) -> tuple[Number, Number, Number]:
    """Forward, input gradients, weight gradients of the four linear layers (q, k, v in one; gate and up in one)."""
    shapes = (
        (work.hidden / work.y, (work.queries + 2 * work.keys) / work.x),
        (work.queries / work.x, work.hidden / work.y),
        (work.hidden / work.y, work.ups / work.x),
        (work.inner / work.x, work.hidden / work.y),
    )
    each = [_linear(work, rates, rates.matmul, inner, out) for inner, out in shapes]
    forward, inputs, weights = (sum(parts) for parts in zip(*each, strict=True))
    return forward, inputs, weights


def _linear(work: Workload, rates: Rates, rate: Number, inner: Number, out: Number) -> tuple[Number, Number, Number]:
    """Outputs, input gradient, weight gradient of one linear layer; rate: of the best layout of operands."""
    tokens, how = work.tokens, {"units": rates.units, "bandwidth": rates.bandwidth, "item": work.bytes}
    return (
        matmul_seconds(tokens, out, inner, rate=rates.nt * rate, **how),
        matmul_seconds(tokens, inner, out, rate=rates.nn * rate, **how),
        matmul_seconds(out, inner, tokens, rate=rates.tn * rate, **how),
    )


def _attention(work: Workload, rates: Rates) -> tuple[Number, Number]:
    """Forward and backward of the attention core; each rank has its share of heads (or sequences, or queries)."""
    scores = work.micro_batch * work.seq * work.seq * work.queries / work.head_dim / (work.x * work.y * work.cp)
    flops = 4 * scores * work.head_dim / 2
    flash = attention_core.flash_seconds(flops, work.seq, work.head_dim, rate=rates.attention)
    how = {"rate": rates.matmul, "bandwidth": rates.bandwidth}
    plain = _softmax_is_plain(work)
    moved = np.where(plain, attention_core.PLAIN_FORWARD, attention_core.UNFUSED_FORWARD)
    moved_back = np.where(plain, attention_core.PLAIN_BACKWARD, attention_core.UNFUSED_BACKWARD)
    forward = attention_core.unfused_seconds(scores, work.head_dim, **how, moved_per_score=moved)
    backward = attention_core.unfused_seconds(2 * scores, work.head_dim, **how, moved_per_score=moved_back / 2)
    return (
        np.where(work.flash, flash, forward),
        np.where(work.flash, attention_core.BACKWARD * flash, backward),
    )


def _softmax_is_plain(work: Workload) -> Number:
    heads = work.queries / work.head_dim / (work.x * work.y)
    return attention_core.softmax_is_plain(work.flash, work.micro_batch, heads)


def pointwise_traffic(work: Workload) -> tuple[Number, Number]:
    """Bytes that one block moves besides its products and its attention, in the forward and in the backward."""
    token, gated = work.bytes * work.tokens, work.ups > work.inner
    residual = token * work.hidden / (work.y * np.where(work.split_residual, work.x, 1))
    heads = token * (work.queries + 2 * work.keys) / (work.x * work.y)
    inner = token * work.inner / work.x
    apart = np.where(work.x * work.y > 1, 2 * residual, 0)  # of sums over x, which a product cannot add
    biased = np.where(work.biases, heads + np.where(gated, 0, inner + apart), 0)
    both = token * (work.queries + work.keys) / (work.x * work.y)
    turned = np.where(work.rope, both * work.turned, 0)
    others = pointwise.others_bytes(residual, heads, turned, inner, gated, work.fused)
    fused = np.asarray(work.fused, bool)
    own = pointwise.own_bytes(
        residual, turned, np.where(work.head_norms, both, 0), biased, inner, gated=gated, fused=fused,
        core_fused=fused & (work.cp == 1), chains=(work.y > 1) | work.zero_centered, layer_norm=work.layer_norm,
    )  # fmt: skip
    is_own = np.asarray(work.own, bool)
    forward, backward = (
        np.where(is_own, ours + copied, theirs) for ours, copied, theirs in zip(own, _copied(work), others, strict=True)
    )
    return forward, backward


def _copied(work: Workload) -> tuple[Number, Number]:
    """Bytes that fourfold reads and writes to lay out what collectives send or bring, forward and backward. Over x all
    tokens, four times, where sequences are several: a rank's parts of them are no neighbours. Over y features, which
    are put together for one collective besides."""
    token = work.bytes * work.tokens
    over_x = np.where((work.x > 1) & (work.micro_batch > 1), 8 * token * work.hidden / work.y, 0)
    qkv, queries = token * (work.queries + 2 * work.keys) / work.x, token * work.queries / work.x
    over_y = np.where(work.y > 1, 4 * qkv + 2 * queries, 0)
    over_y_back = np.where(work.y > 1, 2 * qkv * (1 + 1 / work.y) + 2 * queries, 0)
    return over_x + over_y, over_x + over_y_back


def _activation(work: Workload, rates: Rates) -> Number:
    """Of the MLP: reads gate and up, writes what down_proj reads."""
    return work.bytes * work.tokens * (work.ups + work.inner) / work.x / rates.bandwidth


def _over_x(work: Workload, group: Group) -> tuple[Number, Number, Number]:
    """Forward, backward, and what of the backward has a weight gradient to hide behind."""
    residual = work.bytes * work.tokens * work.hidden / work.y
    one = gather_seconds(residual, 1, group)
    again = np.where(work.regather, 2 * one, 0.0)
    return 4 * one, 4 * one + again, 2 * one + again


def _over_y(work: Workload, group: Group) -> tuple[Number, Number, Number]:
    item = work.bytes * work.tokens / work.x
    qkv, queries = work.queries + 2 * work.keys, work.queries
    statistics = reduce_seconds(4 * work.tokens / work.x, 1, group)
    sums = np.where(work.own, work.ups / work.inner, 1)
    forward = gather_seconds(item * (qkv + queries), 2, group) + reduce_seconds(item * work.ups, sums, group)
    hideable = reduce_seconds(item * work.inner, 1, group) + gather_seconds(item * queries, 1, group)
    return forward + 2 * statistics, hideable + gather_seconds(item * qkv, 1, group) + 2 * statistics, hideable


def _gate_sum(work: Workload, group: Group) -> Number:
    """The sum over y of what the activation reads besides up."""
    return np.where(work.ups > work.inner, reduce_seconds(work.bytes * work.tokens * work.inner / work.x, 1, group), 0)


def _head(work: Workload, rates: Rates, x_group: Group, y_group: Group) -> tuple[Number, Number, Number, Number]:
    """Head and loss, forward and backward: compute, over x, over y; and the embedding."""
    tokens, columns, hidden = work.tokens, work.vocab / work.x, work.hidden / work.y
    products = sum(_linear(work, rates, rates.head, hidden, columns))
    # Logits in 16 and in 32 bits, written and read by softmax, loss and gradient.
    loss = tokens / work.y * columns * (2 * work.bytes + 20) / rates.bandwidth
    residual = work.bytes * tokens * hidden
    over_x = gather_seconds(2 * residual, 2, x_group)
    over_y = gather_seconds(2 * work.bytes * tokens * columns, 2, y_group)
    embedding = 6 * residual / rates.bandwidth + gather_seconds(2 * residual, 2, x_group)
    return products + loss, over_x, over_y, embedding
