"""The grid: every process has a place on six axes, and a group with its peers along each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fourfold.config.run import AXES, ParallelConfig
from fourfold.errors import UserError


@dataclass(frozen=True)
class Axis:
    """One axis as one process sees it: its size, this process's place on it, and the group along it."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup


class Grid:
    """A ``DeviceMesh`` of (pp, dp, cp, z, y, x), always all six, over all processes of the job.

    Several grids may live in one process; nothing is global.
    """

    def __init__(self, sizes: ParallelConfig, device_type: str) -> None:
        """Make the groups. Every process of the job must call this, with the same sizes."""
        if sizes.world_size != dist.get_world_size():
            raise UserError(
                f"the grid pp·dp·cp·z·y·x = {'·'.join(str(getattr(sizes, a)) for a in AXES)} needs {sizes.world_size} "
                f"processes, and there are {dist.get_world_size()}; start {sizes.world_size}, or change [parallel]"
            )
        self.sizes = sizes
        shape = tuple(getattr(sizes, axis) for axis in AXES)
        self.mesh: DeviceMesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        self.device_type = device_type
        self._axes = {name: self._axis(name, self.mesh[name]) for name in AXES}
        # Groups over two axes, made at the start: making one later would be a collective in the middle of a step.
        self.batch_mesh: DeviceMesh = self.mesh["dp", "z"]._flatten("dp_z")
        self._axes["dp_z"] = self._axis("dp_z", self.batch_mesh)
        self._axes["y_x"] = self._axis("y_x", self.mesh["y", "x"]._flatten("y_x"))

    def axis(self, name: str) -> Axis:
        """An axis by name, or ``dp_z`` or ``y_x``, two as one."""
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """All of them, the single ones first."""
        return list(self._axes.values())

    @property
    def x(self) -> Axis:
        return self._axes["x"]

    @property
    def y(self) -> Axis:
        return self._axes["y"]

    @property
    def batch(self) -> Axis:
        """The processes that split the batch: dp and, inside it, z."""
        return self._axes["dp_z"]

    @staticmethod
    def _axis(name: str, mesh: DeviceMesh) -> Axis:
        return Axis(name, mesh.size(), mesh.get_local_rank(), mesh.get_group())
