"""Compute the time of a collective that runs as a ring or a tree, inside a node or across nodes. Groups that
communicate at the same time share a node's network adapters."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine


class RankGroup(NamedTuple):
    """A group of ranks that communicate. A *domain* is a set of nodes that fast links connect (NVL72).

    - size: number of ranks in the group.
    - inside: number of the group's ranks in one node, or in one domain.
    - nodes: number of nodes, or of domains, that the group's ranks are in.
    - bandwidth: bytes per second of the slowest link.
    - ring, tree: total latency of the steps of a ring, or of a tree, in seconds.
    - base: seconds of latency per collective, in addition to its steps.
    - floor: lower bound on the seconds of a collective whose ring leaves a node. 0 without such a bound.
    """

    size: Number
    inside: Number
    nodes: Number
    bandwidth: Number
    ring: Number
    tree: Number
    base: Number
    floor: Number


def group_of(size: Number, stride: Number, machine: Machine, constants: Constants) -> RankGroup:
    """Return the size, bandwidth, and latencies of a group of ranks. Consecutive ranks fill one node after another.

    All groups of an axis communicate at the same time. The groups that have ranks in a node and also in other nodes
    share the node's adapters equally (AxoNN, arXiv 2502.08145, section V-C). All ranks that a group has in one node use
    the group's share together.

    Args:
        size: Number of ranks in the group.
        stride: Distance in ranks between neighbors in the group.
        machine: Bandwidths and latencies of the machine's links.
        constants: How close collectives get to these bandwidths and latencies.
    """
    fast = np.maximum(machine.domain, machine.gpus_per_node)
    inside = np.clip(np.floor(fast / stride), 1, size)
    nodes = np.ceil(size / inside)
    near = np.where(inside <= 2, machine.intra2, np.where(inside <= 4, machine.intra4, machine.intra8))
    intra = constants.intra * np.where(
        stride > 1, np.minimum(near, np.where(inside <= 2, machine.intra_far, near)), near
    )
    # In a domain of several nodes (NVL72), the adapters of all its nodes share the traffic that leaves the domain.
    injection = machine.node * (fast / machine.gpus_per_node)
    across = np.minimum(constants.inter * injection * inside / fast, np.where(inside > 1, intra, np.inf))
    hop_in, hop_out = constants.latency * machine.intra_hop, constants.latency * machine.inter_hop
    steps = (size - nodes) * hop_in + np.where(nodes > 1, nodes, 0) * hop_out
    measured = (nodes > 1) & (machine.ring_hop > 0)
    return RankGroup(
        size=size,
        inside=inside,
        nodes=nodes,
        bandwidth=np.where(nodes > 1, across, intra),
        ring=np.where(measured, constants.latency * size * machine.ring_hop, steps),
        tree=2 * (np.log2(inside) * hop_in + np.log2(nodes) * hop_out),
        base=constants.latency * machine.base,
        floor=np.where(nodes > 1, constants.latency * (size - 1) * machine.ring_floor, 0.0),
    )


def gather_seconds(size: Number, count: Number, group: RankGroup) -> Number:
    """Return the seconds of ``count`` ring all-gathers or reduce-scatters. Their gathered tensors have ``size`` bytes
    in total.

    The latency grows with every rank (PCCL, arXiv 2504.18658, figures 4 and 5).
    """
    share = (group.size - 1) / group.size
    seconds = share * size / group.bandwidth + count * (group.base + group.ring)
    return np.where(group.size > 1, np.maximum(seconds, count * group.floor), 0.0)


class ShardGroup(NamedTuple):
    """A group of ranks that shard weights. If ``in_levels`` is set, each collective runs in two levels: over the ranks
    ``inside`` a node, and then ``across`` nodes. Otherwise, it runs over the ``whole`` group at once."""

    whole: RankGroup
    inside: RankGroup
    across: RankGroup
    in_levels: np.ndarray


def shard_group_of(
    size: Number, stride: Number, per_node: Number, machine: Machine, constants: Constants
) -> ShardGroup:
    """Return a group of ranks that shard weights. Its collectives run in two levels if ``per_node`` is above 1 and
    below ``size``.

    Args:
        size: Number of ranks in the group.
        stride: Distance in ranks between neighbors in the group.
        per_node: Number of the group's ranks per node.
        machine: Bandwidths and latencies of the machine's links.
        constants: How close collectives get to these bandwidths and latencies.
    """
    whole = group_of(size, stride, machine, constants)
    in_levels = (np.asarray(per_node) > 1) & (per_node < size)
    if not in_levels.any():
        return ShardGroup(whole, whole, whole, in_levels)
    inside = group_of(per_node, stride, machine, constants)
    return ShardGroup(whole, inside, group_of(size / per_node, stride * per_node, machine, constants), in_levels)


def shard_seconds(size: Number, count: Number, group: ShardGroup) -> Number:
    """Return the seconds of ``count`` all-gathers or reduce-scatters of a shard group. Their gathered tensors have
    ``size`` bytes in total.

    With two levels, two rings run one after the other: one over the ranks of a node, and one across nodes for each
    rank's share (PCCL, arXiv 2504.18658).
    """
    if not group.in_levels.any():
        return gather_seconds(size, count, group.whole)
    inside = gather_seconds(size, count, group.inside)
    across = gather_seconds(size / group.inside.size, count, group.across)
    return np.where(group.in_levels, inside + across, gather_seconds(size, count, group.whole))


def reduce_seconds(size: Number, count: Number, group: RankGroup) -> Number:
    """Return the seconds of ``count`` all-reduces of ``size`` bytes in total. They move twice as many bytes as
    all-gathers. Their latency is the latency of a ring or of a tree, whichever is lower."""
    share = 2 * (group.size - 1) / group.size
    latency = group.base + np.minimum(2 * group.ring, group.tree)
    return np.where(group.size > 1, share * size / group.bandwidth + count * latency, 0.0)
