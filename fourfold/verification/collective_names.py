"""Name the axis, the operation, and the purpose of each collective, including FSDP2's collectives. The collective's
process group determines the axis."""

import torch.distributed as dist

from fourfold.parallel.grid.communicate import PURPOSE
from fourfold.parallel.grid.grid import Grid
from fourfold.verification.exposure import Line

DATA_AXES = ("z", "dp", "cp", "dp_cp", "dp_z", "dp_cp_z", "ep_replicas", "ep_copies", "ep_shards")
FSDP_PURPOSE = {"all_gather": "weights", "reduce_scatter": "gradients", "all_reduce": "gradients"}
"""The purpose of each of FSDP2's collectives, by operation. FSDP2 issues only these three operations, and does not name
their purpose itself."""


class CollectiveNames:
    """Names the collectives that a process issues on a grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._axis_of_group: dict[str, str] = {}
        # Register the group of the axis ep here. ``_axis_of`` finds other axes by their ranks, but ep may have the same
        # ranks as another axis.
        if grid.ep.size > 1:
            self._axis_of_group[grid.ep.group.group_name] = "ep"
        for levels in grid.levels.values():
            axis = self._axis_of(levels.whole.group)
            self._axis_of_group[levels.across.group.group_name] = f"{axis} across nodes"
            for inside in (levels.inside, levels.inside_for_sums):
                self._axis_of_group[inside.group.group_name] = f"{axis} inside nodes"

    def line(self, operation: str, group: dist.ProcessGroup) -> Line:
        """Return the axis, the operation, and the purpose of the collective that is being issued.

        Args:
            operation: torch's name of the operation. If ``PURPOSE`` is set and names an operation, this function
                returns that name instead of torch's name.
            group: The process group of the collective.
        """
        axis, purpose = self._axis_of(group), PURPOSE.get()
        if purpose is not None:
            return axis, purpose.operation or operation, purpose.why
        assert axis.split()[0] in DATA_AXES, f"a collective over {axis} without a purpose"
        return axis, operation, FSDP_PURPOSE[operation]

    def _axis_of(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._axis_of_group:
            # Compare the ranks of groups, because FSDP2 creates its own groups along the grid's axes.
            axes, ranks = [*self._grid.axes(), *self._grid.neighbors.values()], dist.get_process_group_ranks(group)
            names = (axis.name for axis in axes if dist.get_process_group_ranks(axis.group) == ranks)
            self._axis_of_group[group.group_name] = next(names, "world")
        return self._axis_of_group[group.group_name]
