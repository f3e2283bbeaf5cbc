"""Compute how long weight all-gathers and gradient sums take if nothing hides them. They run over the ranks that shard
or replicate the weights."""

from dataclasses import dataclass

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Flag, Number
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts, where_experts
from fourfold.planning.cost.terms.collective import ShardGroup, group_of, reduce_seconds, shard_group_of, shard_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


@dataclass(frozen=True)
class WeightTraffic(ArrayFields):
    """Seconds of weight and gradient traffic if nothing hides it. ``gradients`` is per step, and all other times are
    per micro-batch. Within one search, these seconds depend only on the grid and on ``zero``.

    - block: time to gather a block's weights twice, for the forward and for the backward pass, and to scatter the
      block's gradients.
    - table: time to gather the weight of the embedding or of the head once, and to scatter its gradient.
    - outermost: time to gather a block's weights only once, and to scatter the block's gradients.
    - of_z, table_of_z: the fraction of ``block`` and of ``table`` that would remain if dp and cp were both 1. These are
      not seconds.
    - gradients: time of the traffic that occurs once per step. With ``zero`` 0, this traffic sums gradients over
      replicas. With ``zero`` 1, it scatters gradients to the shards. If weights are gathered once per step
      (``gathered_once_a_step``), it includes this gather. With ``zero`` 2 and 3, gradients are sent in every
      micro-batch, so they are not included.
    """

    block: Number
    table: Number
    outermost: Number
    of_z: Number
    table_of_z: Number
    gradients: Number


def weight_traffic(work: Workload, machine: Machine, constants: Constants) -> WeightTraffic:
    """Return the seconds of weight and gradient traffic for each case of ``work``, such as one layout."""
    weights, table = work.block_weights, work.model.padded_vocab_size * work.model.hidden_size
    twice = weight_traffic_seconds(work, machine, constants, weights, 2)
    outermost = weight_traffic_seconds(work, machine, constants, weights, 1)
    of_table = weight_traffic_seconds(work, machine, constants, table, 1)
    alone = work.but(dp=1, cp=1)
    of_z = _share(weight_traffic_seconds(alone, machine, constants, weights, 2), twice)
    table_of_z = _share(weight_traffic_seconds(alone, machine, constants, table, 1), of_table)
    gradients = _gradient_sum_seconds(work, machine, constants)
    if has_experts(work):
        experts, weights = states_of_experts(work), work.model.expert_weights
        again, once = (weight_traffic_seconds(experts, machine, constants, weights, gathers) for gathers in (2, 1))
        twice, outermost = twice + where_experts(work, again), outermost + where_experts(work, once)
        gradients = gradients + where_experts(work, _gradient_sum_seconds(experts, machine, constants))
    return WeightTraffic(twice, of_table, outermost, of_z, table_of_z, gradients)


def _share(part: Number, whole: Number) -> Number:
    """Return ``part`` as a fraction of ``whole``, or 1 if ``whole`` is 0 because nothing is sent."""
    return np.where(whole > 0, np.minimum(part / np.maximum(whole, 1e-30), 1.0), 1.0)


def weight_traffic_seconds(
    work: Workload, machine: Machine, constants: Constants, weights: Number, gathers: int
) -> Number:
    """Return the seconds per micro-batch to gather some weights and to scatter their gradients, if nothing hides this
    traffic.

    Traffic that occurs once per step is not included (``WeightTraffic.gradients``).

    Args:
        work: Layout, batch, and training framework of the step.
        machine: Links of the machine.
        constants: How close collectives get to the bandwidth and latency of these links.
        weights: Number of weight entries, before x and y split them.
        gathers: How often the weights are gathered: 1 for the forward pass only, or 2 for the backward pass too.
    """
    layout, step = work.layout, work.step
    item, weights = step.item_bytes, weights / (layout.x * layout.y)
    tensor = layout.x * layout.y
    all_of_dp = layout.dp * layout.cp
    per_node = work.program.shards_per_node
    z_group = shard_group_of(layout.z, tensor, per_node, machine, constants)
    wide = shard_group_of(layout.z * all_of_dp, tensor, per_node, machine, constants)
    three, sharded = layout.zero == 3, (layout.zero > 0) & (layout.zero < 3)
    each = np.where(gathered_once_a_step(work), 0.0, 1.0)

    def gathered_and_scattered(group: ShardGroup) -> Number:
        scattered = np.where(work.program.scatter_bytes > 0, work.program.scatter_bytes, step.reduce_bytes)
        gathered = shard_seconds(gathers * item * weights, gathers * work.program.gathers_per_block, group)
        return gathered + shard_seconds(scattered * weights, 1, group)

    again = shard_seconds((gathers - 1) * item * weights, gathers - 1, z_group)
    scattered = np.where(layout.zero == 2, 1.0, 0.0)
    z_sharded = each * (shard_seconds(item * weights, 1, wide) + again)
    z_sharded = z_sharded + scattered * shard_seconds(step.reduce_bytes * weights, 1, wide)
    return np.where(three, gathered_and_scattered(wide),
                    np.where(sharded, z_sharded, gathered_and_scattered(z_group)))  # fmt: skip


def gathered_once_a_step(work: Workload) -> Flag:
    """Return whether sharded weights are gathered once per step instead of once per micro-batch. This is the case with
    distributed optimizers, and with ``zero`` 1 or 2 if z = 1."""
    layout = work.layout
    return work.program.weights_kept | ((layout.zero > 0) & (layout.zero < 3) & (layout.z == 1))


def _gradient_sum_seconds(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the seconds of the traffic that occurs once per step, if nothing hides it. The traffic of experts is not
    included.

    A distributed optimizer (zero 1 with ``weights_kept``) scatters gradients, and gathers weights in the next forward
    pass.
    """
    model, layout, step, program = work.model, work.layout, work.step, work.program
    weights = (model.num_hidden_layers / layout.pp * work.block_weights + work.table_weights) / (layout.x * layout.y)
    copies = layout.dp * layout.cp
    across = group_of(copies, layout.x * layout.y * layout.z, machine, constants)
    wide = shard_group_of(copies * layout.z, layout.x * layout.y, program.shards_per_node, machine, constants)
    reduced = reduce_seconds(step.reduce_bytes * weights / layout.z, 1, across)
    scattered = shard_seconds(step.reduce_bytes * weights, 1, wide)
    scattered = np.where(program.all_reduces_gradients, reduced, scattered)
    gathered = np.where(gathered_once_a_step(work), shard_seconds(step.item_bytes * weights, 1, wide), 0.0)
    sending = np.where(layout.zero == 0, reduced, np.where(layout.zero == 1, scattered + gathered, 0.0))
    return np.where(layout.zero == 2, gathered, sending)
