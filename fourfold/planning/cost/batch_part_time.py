"""Compute the time of each matmul and collective of one batch part in one block."""

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.attention_time import attention_seconds
from fourfold.planning.cost.block_time import norm_seconds, whole_keys_seconds
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.terms.collective import gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.matmul import linear_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


def batch_part_time(work: Workload, machine: Machine, constants: Constants) -> dict[str, Number]:
    """Return the seconds of each event of ``batch_part_events``, by the event's name (``Event.what``). All blocks must
    have a dense MLP.

    The name of a layer, such as ``up``, is the name of the layer's matmul in the forward pass. ``up_input_gradient``
    and ``up_weight_gradient`` are the matmuls of the layer's backward pass. ``up_x`` is one of the layer's collectives
    over x. The layer ``up`` computes both gate and up. ``half_up`` is the matmul of only one of them, and ``up_y`` is
    the sum of only one of them over y. ``keys_y`` is the gather of keys and values over y, or the sum of their
    gradients, if the y ranks divide the queries of a sequence.

    All collectives of a block over x take the same time.
    """
    part = work.but(micro_batch_size=work.layout.micro_batch_size / work.active_parts)
    model, layout, rates, item = work.model, work.layout, Rates(work, machine, constants), work.step.item_bytes
    x_group, y_group = group_of(layout.x, 1, machine, constants), group_of(layout.y, layout.x, machine, constants)
    hidden, qkv = model.hidden_size / layout.y, (model.queries + 2 * model.keys) / layout.x
    queries, gate_up, inner = (size / layout.x for size in (model.queries, model.gate_up, model.intermediate_size))
    shapes = {"qkv": (hidden, qkv), "o_proj": (queries, hidden), "up": (hidden, gate_up), "down": (inner, hidden)}
    seconds: dict[str, Number] = {}
    over_x = gather_seconds(item * part.tokens * hidden, 1, x_group)
    for name, (features, out) in shapes.items():
        output, of_input, of_weight = linear_seconds(part.tokens, features, out, item, rates, rates.matmul)
        seconds |= {name: output, f"{name}_input_gradient": of_input, f"{name}_weight_gradient": of_weight}
        seconds[f"{name}_x"] = over_x
    attention, attention_backward = attention_seconds(part, rates, machine)
    token = item * part.tokens
    return seconds | {
        "half_up": seconds["up"] / 2,
        "attention": attention,
        "attention_backward": attention_backward,
        "qkv_y": gather_seconds(token * qkv, 1, y_group),
        "o_proj_y": gather_seconds(token * queries, 1, y_group),
        "up_y": reduce_seconds(token * inner, 1, y_group),
        "down_y": reduce_seconds(token * inner, 1, y_group),
        "norm_y": norm_seconds(part, y_group),
        "keys_y": whole_keys_seconds(part, y_group),
    }
