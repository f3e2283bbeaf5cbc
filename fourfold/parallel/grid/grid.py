"""Build the grid. Every process has a position on six axes, and belongs to one process group per axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.config.run import AXES, ParallelConfig
from fourfold.errors import UserError
from fourfold.heartbeat import join
from fourfold.parallel.grid.process_group import (
    default_group,
    ensure_process_group,
    group_among,
    limit_waiting,
    warn_of_other_nodes,
)

FLATTENED = (("dp", "cp"), ("dp", "z"), ("dp", "cp", "z"), ("y", "x"))
"""Combinations of axes that some collectives run over."""


@dataclass(frozen=True)
class Axis:
    """One axis, as one process sees it: the axis's size, this process's position, and this process's group."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup

    @cached_property
    def members(self) -> str:
        """Return a name for this group, made of the axis and the group's first and last rank. No other group of the
        axis has the same name."""
        ranks = dist.get_process_group_ranks(self.group)
        return f"{self.name} of {ranks[0]}-{ranks[-1]}"


@dataclass(frozen=True)
class TwoLevels:
    """Two groups for collectives in two levels, over an axis that spans several nodes.

    ``inside`` has the axis's ranks on this node. ``across`` has one rank per node: the ranks at the same position in
    their nodes. FSDP2 uses this object as a process group, and calls its ``size`` and ``rank``.
    """

    whole: Axis
    inside: Axis
    across: Axis
    inside_for_sums: Axis
    """The same ranks as ``inside``, for sums. On gloo, sums need their own group, because the thread ``gathers`` uses
    the group of ``inside`` at the same time."""
    gathers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """On gloo, this thread starts the second level of all-gathers. With only one thread, all ranks start them in the
    same order."""

    def size(self) -> int:
        return self.whole.size

    def rank(self) -> int:
        """Return the index of this process's shard.

        Processes at the same position in their nodes hold consecutive shards. So the data that a process sends or
        receives is contiguous in both levels.
        """
        return self.inside.rank * self.across.size + self.across.rank


class Grid:
    """Arranges the processes of a job along the six axes (pp, dp, cp, z, y, x), and creates their process groups.

    The attributes x, y, z, cp, and pp are single axes. dp has no attribute: call ``axis("dp")``. These attributes are
    axes too:

    - ``batch``: the processes that split the batch (dp and z, with z as the inner axis).
    - ``replicas``: the processes that may hold the same weights (dp and cp).
    - ``tokens``: the processes that split a step's tokens and sum its gradients (dp, cp, and z).
    - ``ep``: neighboring processes on the ``tokens`` axis that together hold one copy of all experts.
    - ``expert_replicas``: the processes that hold the same experts.

    Every process of the job must create the grid with the same sizes, because the processes create the process groups
    together. If the program has not started torch's default process group, the grid also starts this group. The backend
    is nccl for ``"cuda"``, and gloo otherwise. Several grids can live in one process.

    Args:
        sizes: Sizes of the axes.
        device_type: "cuda" or "cpu".

    Raises:
        UserError: The product of the sizes is not the number of processes. Or the default process group cannot be
            started, because no launcher has started the processes, they cannot connect, or there are too few GPUs.
    """

    def __init__(self, sizes: ParallelConfig, device_type: str) -> None:
        """Create the groups. Every process of the job must call this with the same sizes."""
        ensure_process_group(device_type, sizes.world_size)
        if sizes.world_size != dist.get_world_size():
            raise UserError(
                f"the grid pp·dp·cp·z·y·x = {'·'.join(str(getattr(sizes, a)) for a in AXES)} needs {sizes.world_size} "
                f"processes, but there are {dist.get_world_size()}; start {sizes.world_size}, or change [parallel]"
            )
        self.sizes = sizes
        shape = tuple(getattr(sizes, axis) for axis in AXES)
        self.ranks = torch.arange(sizes.world_size).view(shape)
        """All ranks, by their positions on the six axes."""
        self.device_type = device_type
        # Create all groups now. Creating a group is a collective, which must not run in the middle of a step. Axes with
        # the same ranks share one group, because NCCL allocates buffers for each group.
        groups: dict[tuple[str, str], dist.ProcessGroup | None] = {}
        self._axes = {"_".join(axes): self._axis(axes, groups) for axes in (*((axis,) for axis in AXES), *FLATTENED)}
        self.neighbors = self._neighbors()
        """This process's neighbors in the pipeline, by their pp rank. Each pair of neighbors has its own group."""
        self.levels: dict[tuple[str, int], TwoLevels] = {}
        """The groups with two levels that ``shards`` has created, by the axis's name and the number of ranks per
        node."""
        for axis in (*self._axes.values(), *self.neighbors.values()):
            limit_waiting(axis.group, device_type)
            if axis.size > 1:
                join(axis.members)
        self.x, self.y, self.z, self.cp, self.pp = (self._axes[name] for name in ("x", "y", "z", "cp", "pp"))
        self.batch, self.replicas, self.tokens = (self._axes[name] for name in ("dp_z", "dp_cp", "dp_cp_z"))
        # FSDP2 needs a device mesh of the processes that split the tokens. Create one mesh with a single axis, and one
        # with the two axes (dp·cp, z).
        tokens = torch.tensor(dist.get_process_group_ranks(self.tokens.group))
        self.tokens_mesh = DeviceMesh.from_group(self.tokens.group, device_type, tokens, mesh_dim_names=("dp_cp_z",))
        ranks = tokens.view(self.replicas.size, -1)
        two_groups = [self.replicas.group, self.z.group]
        self.hybrid_mesh = DeviceMesh.from_group(two_groups, device_type, ranks, mesh_dim_names=("dp_cp", "z"))
        self._place_experts(sizes.ep)

    def axis(self, name: str) -> Axis:
        """Return an axis by its name.

        Args:
            name: One of the six axes, or one of the combinations ``dp_cp``, ``dp_z``, ``dp_cp_z``, and ``y_x``.
        """
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """Return all axes, with single axes before combinations."""
        return list(self._axes.values())

    def stage(self) -> Axis:
        """Return all ranks of this process's pipeline stage as one axis.

        Every process of the job must call this, because the first call may create the group.
        """
        if self.pp.size == 1:
            ranks = self.ranks.numel()
            return Axis("world", ranks, dist.get_rank(), default_group())
        if "stage" not in self._axes:
            # pp is the outermost axis, so the ranks of a stage are consecutive.
            ranks = self.ranks.numel() // self.pp.size
            group = group_among([list(range(place * ranks, (place + 1) * ranks)) for place in range(self.pp.size)])
            self._axes["stage"] = self._axis_among("stage", group)
        return self._axes["stage"]

    def shards(self, name: str, per_node: int) -> dist.ProcessGroup | TwoLevels:
        """Return the process group of an axis that shards weights.

        The result is a group with two levels if the axis spans several nodes and has several ranks on each node. The
        first call creates the groups, so every process of the job must call this with the same arguments.

        Args:
            name: The axis, ``z`` or ``dp_cp_z``.
            per_node: Number of the axis's ranks on each node. If the axis spans nodes, its size must be divisible by
                this number.
        """
        whole = self._axes[name]
        if not 1 < per_node < whole.size:
            return whole.group
        if (name, per_node) not in self.levels:
            assert whole.size % per_node == 0, f"{name} has {whole.size} ranks, {per_node} in a node"
            warn_of_other_nodes(per_node * self.x.size * self.y.size)
            outer = [axis for axis in AXES if axis not in name.split("_")]
            ranks = self.ranks.permute([AXES.index(axis) for axis in (*outer, *name.split("_"))])
            nodes = ranks.reshape(-1, whole.size // per_node, per_node)
            inside, across = nodes.flatten(0, 1), nodes.mT.flatten(0, 1)
            first, second = self._level(name, inside), self._level(name, across)
            again = self._level(name, inside) if dist.get_backend(first.group) == "gloo" else first
            self.levels[name, per_node] = TwoLevels(whole, first, second, again)
        return self.levels[name, per_node]

    def _level(self, name: str, sets: Tensor) -> Axis:
        return self._axis_among(name, group_among(sets.tolist()))

    def _axis_among(self, name: str, group: dist.ProcessGroup | None) -> Axis:
        assert group is not None, "every process is in one of the sets"
        limit_waiting(group, self.device_type)
        return Axis(name, group.size(), group.rank(), group)

    def _place_experts(self, ep: int) -> None:
        """Create ``ep``, the ranks that together hold one copy of the experts, and ``expert_replicas``, the ranks that
        hold the same experts.

        ``expert_replicas`` is also divided into two axes, ``expert_copies`` and ``expert_shards``. If ep divides z, the
        ranks of ``expert_shards`` belong to one z group.
        """
        if ep == 1:
            # An axis of size 1 never uses its group, so any group works here.
            self.ep = Axis("ep", 1, 0, self.x.group)
            self.expert_replicas, self.expert_copies, self.expert_shards = self.tokens, self.replicas, self.z
            return
        ranks = self.ranks.permute([AXES.index(axis) for axis in ("pp", "y", "x", "dp", "cp", "z")])
        by_place = ranks.reshape(-1, self.tokens.size // ep, ep)
        self.ep = self._level("ep", by_place.flatten(0, 1))
        replicas = by_place.mT.flatten(0, 1)
        # If ep divides z, the z/ep ranks of a z group that hold the same experts shard them. Otherwise
        # ``expert_shards`` has one rank. If z does not divide ep either, only zero = 3 is legal. It shards the
        # experts over all ranks of ``expert_replicas``.
        shards = self.z.size // ep if self.z.size % ep == 0 else 1
        nodes = replicas.reshape(-1, replicas.shape[1] // shards, shards)
        self.expert_replicas = self._level("ep_replicas", replicas)
        self.expert_copies = self._level("ep_copies", nodes.mT.flatten(0, 1))
        self.expert_shards = self._level("ep_shards", nodes.flatten(0, 1))
        self._axes |= {
            axis.name: axis for axis in (self.ep, self.expert_replicas, self.expert_copies, self.expert_shards)
        }

    @property
    def shards_of_experts(self) -> Axis:
        """Return the axis of the ranks that shard the same experts."""
        return self.expert_replicas if self.sizes.zero else self.expert_shards

    def expert_mesh(self, hybrid: bool) -> DeviceMesh:
        """Return a device mesh for FSDP2 with the ranks that hold the same experts.

        Args:
            hybrid: Whether the mesh has the two axes (copies, shards). Otherwise it has one axis.
        """
        replicas, copies, shards = self.expert_replicas, self.expert_copies, self.expert_shards
        ranks = torch.tensor(dist.get_process_group_ranks(replicas.group))
        if not hybrid:
            return DeviceMesh.from_group(replicas.group, self.device_type, ranks, mesh_dim_names=("ep_replicas",))
        groups, names = [copies.group, shards.group], ("ep_copies", "ep_shards")
        return DeviceMesh.from_group(groups, self.device_type, ranks.view(-1, shards.size), mesh_dim_names=names)

    def _neighbors(self) -> dict[int, Axis]:
        """Create a group for each pair of neighbors on the pipeline ring.

        NCCL runs the transfers of a group one after another. If all stages shared one group, a tensor for one neighbor
        would wait for tensors from the other neighbor.
        """
        pp = self._axes["pp"]
        if pp.size <= 2:
            return {1 - pp.rank: pp} if pp.size == 2 else {}
        pairs = [(stage, (stage + 1) % pp.size) for stage in range(pp.size)]
        rings = self.ranks.flatten(1)
        found = {}
        # ``group_among`` needs disjoint groups, but neighboring pairs share a process. So call it once for the even
        # pairs and once for the odd pairs. If the number of pairs is odd, call it a third time for the last pair.
        for those in filter(None, (pairs[: pp.size // 2 * 2 : 2], pairs[1::2], pairs[pp.size // 2 * 2 :])):
            group = group_among([sorted(ranks) for pair in those for ranks in rings[list(pair)].T.tolist()])
            for first, second in those:
                if group is not None and pp.rank in (first, second):
                    found[first + second - pp.rank] = Axis("pp", 2, dist.get_group_rank(group, dist.get_rank()), group)
        return found

    def _axis(self, axes: Sequence[str], groups: dict[tuple[str, str], dist.ProcessGroup | None]) -> Axis:
        """Create one axis from one or several axes of the grid.

        Args:
            axes: Names of axes.
            groups: The groups created so far. The key says which ranks a group has and which axes may share it.
        """
        others = [axis for axis in AXES if axis not in axes]
        size = math.prod(getattr(self.sizes, axis) for axis in axes)
        sets = self.ranks.permute([AXES.index(axis) for axis in (*others, *axes)]).reshape(-1, size).tolist()
        # cp needs a group of its own. Ring attention sends keys over cp while gradients are summed over dp and cp. In a
        # common group, one transfer would wait for the other.
        key = str(sets), "cp" if axes == ("cp",) and size > 1 else ""
        if key not in groups:
            group = default_group() if len(sets) == 1 and not key[1] else group_among(sets)
            assert group is not None, "every process is in one of the sets"
            groups[key] = group
        return self._axis_among("_".join(axes), groups[key])
