"""Compute the time of an all-to-all of tokens over the ranks that divide the experts."""

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.terms.collective import group_of
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine


def exchange_seconds(
    size: Number, copies: Number, once: Flag, ranks: Number, stride: Number, machine: Machine, constants: Constants
) -> Number:
    """Return the seconds of an all-to-all of tokens over ``ranks`` ranks, with a distance of ``stride`` ranks between
    neighbors. With one rank, the time is 0.

    Each rank sends each of its tokens ``copies`` times. All destination ranks are equally likely. Each rank gets an
    equal share of its node's adapters. The adapters and the links inside the node work concurrently, so the slower of
    them sets the time.

    Args:
        size: Bytes of all tokens of a rank, counting each token once.
        copies: Mean number of experts that each token is sent to.
        once: Whether a token with several copies on one node is sent only once over the network, and once to each rank
            on that node (DeepEP, github.com/deepseek-ai/DeepEP). Otherwise it is sent once per copy.
    """
    group = group_of(ranks, stride, machine, constants)
    near = group_of(group.inside, stride, machine, constants).bandwidth
    far = constants.inter * machine.node / machine.gpus_per_node
    to_ranks = np.where(once, ranks * _share_reached(copies, ranks), copies)
    to_nodes = np.where(once, group.nodes * _share_reached(copies, group.nodes), copies)
    inside = size * to_ranks * (1 - 1 / group.inside) / near
    # With ``once``, every token that arrives at a node also uses the links inside the node. Otherwise, only copies
    # whose sender is on the same node use the links inside the node.
    inside = np.where(once, inside, inside * group.inside / ranks)
    outside = size * to_nodes * (1 - group.inside / ranks) / far
    hops = np.log2(group.inside) * machine.intra_hop + (group.nodes - 1) * machine.inter_hop
    latency = group.base + constants.latency * hops
    return np.where(ranks > 1, np.maximum(inside, outside) + latency, 0.0)


def _share_reached(copies: Number, places: Number) -> Number:
    """Return the expected fraction of ``places`` that get at least one of ``copies`` copies, if each copy goes to a
    random place."""
    return 1 - (1 - 1 / np.maximum(places, 1.0)) ** copies
