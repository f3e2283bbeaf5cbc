"""The grid: every process has a place on six axes, and a group with its peers along each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.config.run import AXES, ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.process_group import ensure_process_group, group_among, limit_waiting, warn_of_slow_groups

FLATTENED = (("dp", "cp"), ("dp", "z"), ("dp", "cp", "z"), ("y", "x"))
"""Axes that some collectives take as one."""


@dataclass(frozen=True)
class Axis:
    """One axis as one process sees it: its size, this process's place on it, and the group along it."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup


class Grid:
    """A ``DeviceMesh`` of (pp, dp, cp, z, y, x), always all six, over all processes of the job.

    x, y, z, cp, pp: single axes; dp is always taken together with others. batch: the processes that split the batch, dp
    and inside it z. replicas: those that may hold the same weights, dp and cp. tokens: those that split the tokens of a
    step, and sum its gradients: dp, cp and z. Several grids may live in one process; nothing is global.
    """

    def __init__(self, sizes: ParallelConfig, device_type: str) -> None:
        """Make the groups. Every process of the job must call this, with the same sizes.

        In a program that torchrun or srun started, this starts torch's default process group too, if the program has
        not: nccl for ``"cuda"``, on this process's GPU, else gloo.
        """
        ensure_process_group(device_type, sizes.world_size)
        if sizes.world_size != dist.get_world_size():
            raise UserError(
                f"the grid pp·dp·cp·z·y·x = {'·'.join(str(getattr(sizes, a)) for a in AXES)} needs {sizes.world_size} "
                f"processes, and there are {dist.get_world_size()}; start {sizes.world_size}, or change [parallel]"
            )
        self.sizes = sizes
        warn_of_slow_groups(device_type)
        shape = tuple(getattr(sizes, axis) for axis in AXES)
        self.mesh: DeviceMesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        self.device_type = device_type
        self._axes = {name: self._axis(name, self.mesh[name]) for name in AXES}
        # Groups over several axes, made at the start: making one later would be a collective in the middle of a step.
        flat = {"_".join(axes): self.mesh[axes]._flatten("_".join(axes)) for axes in FLATTENED}
        self._axes |= {name: self._axis(name, mesh) for name, mesh in flat.items()}
        self.neighbors = self._neighbors()
        """This process's neighbors on pp, by their rank there: a pair, with a group of its own."""
        for axis in (*self._axes.values(), *self.neighbors.values()):
            limit_waiting(axis.group, device_type)
        self.x, self.y, self.z, self.cp, self.pp = (self._axes[name] for name in ("x", "y", "z", "cp", "pp"))
        self.batch, self.replicas, self.tokens = (self._axes[name] for name in ("dp_z", "dp_cp", "dp_cp_z"))
        # For FSDP2: the processes that split the tokens, as one axis and as (dp·cp, z).
        self.tokens_mesh: DeviceMesh = flat["dp_cp_z"]
        ranks = self.tokens_mesh.mesh.view(self.replicas.size, -1)
        groups = [self.replicas.group, self.z.group]
        self.hybrid_mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("dp_cp", "z"))

    def axis(self, name: str) -> Axis:
        """An axis by name, or several as one: ``dp_cp``, ``dp_z``, ``dp_cp_z``, ``y_x``."""
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """All of them, the single ones first."""
        return list(self._axes.values())

    def _neighbors(self) -> dict[int, Axis]:
        """Make a group for each pair of neighbors on the ring of pp.

        NCCL carries out what one group transfers in the order in which it was issued. In a group of all stages a tensor
        for one neighbor would wait for those from the other.
        """
        pp = self._axes["pp"]
        if pp.size <= 2:
            return {1 - pp.rank: pp} if pp.size == 2 else {}
        pairs = [(stage, (stage + 1) % pp.size) for stage in range(pp.size)]
        rings = self.mesh.mesh.flatten(1)
        found = {}
        # Sets of pairs that share no process: every second pair, and the last one where their number is odd.
        for those in filter(None, (pairs[: pp.size // 2 * 2 : 2], pairs[1::2], pairs[pp.size // 2 * 2 :])):
            group = group_among([sorted(ranks) for pair in those for ranks in rings[list(pair)].T.tolist()])
            for first, second in those:
                if group is not None and pp.rank in (first, second):
                    found[first + second - pp.rank] = Axis("pp", 2, dist.get_group_rank(group, dist.get_rank()), group)
        return found

    @staticmethod
    def _axis(name: str, mesh: DeviceMesh) -> Axis:
        return Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group())
