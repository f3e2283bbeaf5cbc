"""Private names of torch that have no public replacement. A new version of torch may change them.

All other modules use only public names of torch. The exception is ``parallel.data.fully_sharded``, which also uses
FSDP2's private names.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_iter

GROUP_METHODS = {
    # The names with "single" exist since torch 2.13.
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    # On gloo, fourfold runs a reduce-scatter as an all-to-all and a local sum
    # (parallel.grid.communicate.by_all_to_all).
    "alltoall_base": "reduce_scatter", "all_to_all_single": "reduce_scatter",
    "send": "send", "recv": "recv",
}  # fmt: skip
"""Maps methods of a process group to the operations that they run. torch's functions and FSDP2 call these methods."""

END_OF_TRANSFERS = "_end_coalescing"
"""The method of a process group that ends a batch of sends and receives. NCCL starts the transfers at this point."""


class MeshWithGroups(DeviceMesh):
    """A device mesh with custom process groups for some of its dims. A custom group has only the methods that FSDP2
    calls."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[int, Any]) -> None:
        # Stop the constructor from creating new groups. Then take over the groups of ``mesh``.
        super().__init__(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        vars(self).update(vars(mesh))
        earlier: dict[Any, Any] = mesh._other_groups if isinstance(mesh, MeshWithGroups) else {}
        self._other_groups: dict[Any, Any] = {**earlier, **groups}

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """Return the process group of a dim. If the dim has a custom group, return the custom group."""
        other: dist.ProcessGroup | None = self._other_groups.get(mesh_dim)
        return super().get_group(mesh_dim) if other is None else other


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return the longest time that a collective of a gloo or NCCL group may wait."""
    return group._get_backend(torch.device(device_type)).options._timeout


def run_forward_pre_hooks(module: nn.Module, input: Tensor) -> Tensor:
    """Run a module's forward pre-hooks as if the module were called with ``input``.

    Returns:
        The input that the hooks pass on to the module.
    """
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            changed: Any = hook(module, (input,), {})
            input = input if changed is None else changed[0][0]
        else:
            changed = hook(module, (input,))
            assert changed is None, "hooks that change the input take keyword arguments, as FSDP2's does"
    return input


def run_forward_hooks(module: nn.Module, outputs: list[Tensor]) -> None:
    """Run a module's forward hooks as if a call of the module had returned ``outputs``. No hook may change them."""
    for key, hook in module._forward_hooks.items():
        more: list[Any] = [{}] if key in module._forward_hooks_with_kwargs else []
        changed = hook(module, (), *more, outputs)
        is_same = changed is None or all(a is b for a, b in zip(changed, outputs, strict=True))
        assert is_same, "the outputs are already in the next block"


def schedule_actions(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[list[Any]]:
    """Return the list of actions of each pipeline rank in one of torch's schedules. In such a list, None means that the
    rank is idle."""
    # Import the module only here, because the import takes long.
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    return get_schedule_ops(schedule, ranks, micro_batches, num_stages_per_rank=stages_per_rank)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples, dicts, and other containers that torch knows."""
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set
