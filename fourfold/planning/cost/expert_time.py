"""Compute how long router, dispatch, and experts take for one micro-batch, as a mean over all blocks. The tensor axes y
and usually x (``experts_over_x``) split each expert. ep divides the experts among its ranks. The dispatch sends tokens
to the ranks of their experts and back."""

from dataclasses import dataclass

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Number
from fourfold.planning.cost.expert_sizes import Rows, rows_of
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.terms import host, pointwise
from fourfold.planning.cost.terms.collective import RankGroup, gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.exchange import exchange_seconds
from fourfold.planning.cost.terms.matmul import linear_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


@dataclass(frozen=True)
class ExpertTime(ArrayFields):
    """Seconds of the experts per block, in the forward and in the backward pass.

    - forward, backward: computation in the forward and in the backward pass.
    - weight_gradients: the part of ``backward`` that computes weight gradients.
    - activation: the part of ``forward`` that selective recompute repeats.
    - x, y, ep: communication over the axis of the same name in the forward pass.
    - x_backward, y_backward, ep_backward: communication over the same axes in the backward pass.
    - launch, launch_backward: host time to launch kernels in the forward and in the backward pass.
    """

    forward: Number = 0.0
    backward: Number = 0.0
    weight_gradients: Number = 0.0
    activation: Number = 0.0
    x: Number = 0.0
    x_backward: Number = 0.0
    y: Number = 0.0
    y_backward: Number = 0.0
    ep: Number = 0.0
    ep_backward: Number = 0.0
    launch: Number = 0.0
    launch_backward: Number = 0.0


def expert_time(work: Workload, machine: Machine, constants: Constants, rates: Rates) -> ExpertTime:
    """Return the times of a block's experts for each case of ``work``, such as one layout. All times are 0 for cases
    without experts."""
    model, layout, step, program = work.model, work.layout, work.step, work.program
    rows = rows_of(work)
    hidden, item = model.hidden_size / layout.y, step.item_bytes
    forward, inputs, weights = _matmuls(work, rows, rates)
    moved, moved_back, activation = _moved(work, rows)
    over_x = np.asarray(program.experts_over_x, bool)
    x_group = group_of(np.where(over_x, layout.x, 1), 1, machine, constants)
    y_group = group_of(layout.y, layout.x, machine, constants)
    x = gather_seconds(2 * item * rows.on_rank * hidden, 2, x_group)
    y, y_backward = _over_y(work, rows, y_group)
    stride = layout.y * np.where(over_x, layout.x, 1)
    chosen = model.num_experts_per_tok
    copies = chosen * rows.sent / np.maximum(work.tokens / layout.x * chosen, 1e-30)
    one = exchange_seconds(
        item * work.tokens / layout.x * hidden * step.imbalance, copies, program.sends_once, layout.ep, stride,
        machine, constants,
    )  # fmt: skip
    counts = exchange_seconds(0.0, 1.0, False, layout.ep, stride, machine, constants)
    several = (layout.ep > 1) * 3 + 2 * (over_x & (layout.x > 1)) + 3 * (layout.y > 1)
    grouped = np.asarray(program.is_fourfold, bool) | program.fused_experts
    launches = host.expert_launches(rows.experts, grouped, program.fused, step.bits == 8, several)
    seconds = ExpertTime(
        forward=forward + moved / rates.bandwidth,
        backward=inputs + weights + moved_back / rates.bandwidth,
        weight_gradients=weights,
        activation=activation / rates.bandwidth,
        x=x,
        x_backward=x,
        y=y,
        y_backward=y_backward,
        ep=2 * one + counts,
        ep_backward=2 * one,
        launch=launches[0] * rates.launch,
        launch_backward=launches[1] * rates.launch,
    )
    return ExpertTime(**{name: model.sparse * value for name, value in vars(seconds).items()})


def _matmuls(work: Workload, rows: Rows, rates: Rates) -> tuple[Number, Number, Number]:
    """Return the seconds of the matmuls of router and experts: in the forward pass, for the input gradients, and for
    the weight gradients. The router computes in fp32. The experts run as grouped matmuls."""
    model, layout, step = work.model, work.layout, work.step
    hidden = model.hidden_size / layout.y
    router = linear_seconds(work.tokens / layout.x, hidden, model.num_experts, 4.0, rates, rates.router)
    up, down = (
        linear_seconds(rows.each, inner, out, step.item_bytes, rates, rates.matmul, rows.experts)
        for inner, out in ((hidden, 2 * rows.inner), (rows.inner, hidden))
    )
    forward, inputs, weights = (sum(parts) for parts in zip(router, up, down, strict=True))
    return forward, inputs, weights


def _moved(work: Workload, rows: Rows) -> tuple[Number, Number, Number]:
    """Return the bytes that the operations between the experts' matmuls move through memory. The three numbers are for
    the forward pass, for the backward pass, and for the activation in the forward pass."""
    model, step, program = work.model, work.step, work.program
    item, hidden = step.item_bytes, model.hidden_size / work.layout.y
    scores = 4 * work.tokens / work.layout.x * model.num_experts
    sent, here = item * rows.sent * hidden, item * rows.on_rank * hidden
    inner = item * rows.on_rank * rows.inner
    return pointwise.expert_bytes(
        scores, sent, here, inner, is_own=program.is_fourfold, fused=program.fused, in_8=step.bits == 8,
        in_place=program.fused_experts, several=rows.experts > 1, biased=program.adds_expert_bias,
    )  # fmt: skip


def _over_y(work: Workload, rows: Rows, group: RankGroup) -> tuple[Number, Number]:
    """Return the seconds of the sums over y in the forward and in the backward pass.

    The forward pass sums the router's scores, gate, and up. The backward pass sums the gradients of the routing weights
    (the factors of the experts' outputs) and the gradients of the down projection's input.
    """
    model, layout, item = work.model, work.layout, work.step.item_bytes
    inner = item * rows.on_rank * rows.inner
    scores = 4 * work.tokens / layout.x * model.num_experts
    forward = reduce_seconds(scores, 1, group) + reduce_seconds(2 * inner, 2, group)
    return forward, reduce_seconds(4 * rows.sent, 1, group) + reduce_seconds(inner, 1, group)
