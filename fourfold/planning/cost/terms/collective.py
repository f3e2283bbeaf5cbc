"""Seconds of a collective: ring and tree, inside a node, across nodes, with the adapters that its peers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fourfold.planning.cases import Number
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine


class Group(NamedTuple):
    """Ranks that communicate: their number, and that in one node; their bandwidth, and the latency of ring and tree."""

    size: Number
    inside: Number
    nodes: Number
    bandwidth: Number
    ring: Number
    tree: Number
    base: Number


def group_of(size: Number, stride: Number, machine: Machine, constants: Constants) -> Group:
    """The group of ``size`` ranks that stand ``stride`` apart, where ranks fill one node after another.

    All groups of an axis work at once: those that leave a node share its adapters, members of one group in it use them
    together (AxoNN, arXiv 2502.08145, section V-C: bandwidth divided by the groups that share it).
    """
    fast = np.maximum(machine.domain, machine.gpus_per_node)
    inside = np.clip(np.floor(fast / stride), 1, size)
    nodes = np.ceil(size / inside)
    near = np.where(inside <= 2, machine.intra2, np.where(inside <= 4, machine.intra4, machine.intra8))
    intra = constants.intra * np.where(
        stride > 1, np.minimum(near, np.where(inside <= 2, machine.intra_far, near)), near
    )
    # A domain of several nodes (NVL72) leaves it through all their adapters.
    injection = machine.node * (fast / machine.gpus_per_node)
    across = np.minimum(constants.inter * injection * inside / fast, np.where(inside > 1, intra, np.inf))
    hop_in, hop_out = constants.latency * machine.intra_hop, constants.latency * machine.inter_hop
    steps = (size - nodes) * hop_in + np.where(nodes > 1, nodes, 0) * hop_out
    measured = (nodes > 1) & (machine.ring_hop > 0)
    return Group(
        size=size,
        inside=inside,
        nodes=nodes,
        bandwidth=np.where(nodes > 1, across, intra),
        ring=np.where(measured, constants.latency * size * machine.ring_hop, steps),
        tree=2 * (np.log2(inside) * hop_in + np.log2(nodes) * hop_out),
        base=constants.latency * machine.base,
    )


def gather_seconds(size: Number, count: Number, group: Group) -> Number:
    """``count`` all-gathers or reduce-scatters of ``size`` bytes (of the full tensor) in all, by a ring: its latency
    grows with every rank (PCCL, arXiv 2504.18658, figures 4 and 5)."""
    share = (group.size - 1) / group.size
    return np.where(group.size > 1, share * size / group.bandwidth + count * (group.base + group.ring), 0.0)


def reduce_seconds(size: Number, count: Number, group: Group) -> Number:
    """``count`` all-reduces of ``size`` bytes in all: a ring moves twice a gather's bytes; a tree has fewer steps."""
    share = 2 * (group.size - 1) / group.size
    latency = group.base + np.minimum(2 * group.ring, group.tree)
    return np.where(group.size > 1, share * size / group.bandwidth + count * latency, 0.0)
