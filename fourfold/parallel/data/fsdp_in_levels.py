"""Run FSDP2's collectives in two levels, inside nodes and across nodes (PCCL, arXiv 2504.18658).

A ring over n ranks takes about n steps, and each step costs one latency. With two levels, the number of steps is about
the number of ranks per node plus the number of nodes. An all-gather first runs across nodes. In this level, all ranks
of a node send their own shards over the network at the same time. The second level runs inside each node. A
reduce-scatter first runs inside each node. So only one sum per node crosses the network, and each rank of the node
sends its share of this sum.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.parallel.grid.communicate import all_gather_single, reduce_scatter_single
from fourfold.parallel.grid.grid import TwoLevels
from fourfold.torch_internals import MeshWithGroups


def in_levels(mesh: DeviceMesh, shards: dist.ProcessGroup | TwoLevels) -> DeviceMesh:
    """If ``shards`` has two levels, return a mesh whose last dim uses ``shards`` as its process group. Otherwise return
    the mesh unchanged."""
    return MeshWithGroups(mesh, {mesh.ndim - 1: shards}) if isinstance(shards, TwoLevels) else mesh


class Allocation:
    """Base class for custom collectives of FSDP2. It allocates FSDP2's buffers as ordinary tensors."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherInLevels(Allocation):
    """An all-gather in one or two levels, for FSDP2's ``set_custom_all_gather``.

    On a GPU, both levels run on the stream that FSDP2 uses for all-gathers.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | TwoLevels, async_op: bool = False
    ) -> dist.Work | None:
        if isinstance(group, TwoLevels):
            mine = output_tensor.view(group.inside.size, -1)[group.inside.rank]
            all_gather_single(mine, input_tensor, group=group.across.group)
            input_tensor, group = mine, group.inside.group
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class SumInLevels(Allocation):
    """A reduce-scatter in one or two levels, for FSDP2's ``set_custom_reduce_scatter``.

    With two levels, it overwrites a part of the input with the node's sum.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | TwoLevels,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if isinstance(group, TwoLevels):
            mine = input_tensor.view(group.inside.size, -1)[group.inside.rank]
            reduce_scatter_single(mine, input_tensor, op=op, group=group.inside_for_sums.group)
            input_tensor, group = mine, group.across.group
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class SumOfOneShard(Allocation):
    """Allocates the buffers of gradients whose shard group has only one rank, for FSDP2's
    ``set_custom_reduce_scatter``.

    For such a group, FSDP2 sends nothing and only copies the gradients from its input buffer to its output buffer. This
    class returns the same tensor for both buffers, so that the copy needs no memory. FSDP2 allocates the input buffer
    first, and then the output buffer.
    """

    _input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._input is None:
            self._input = super().allocate(size, dtype=dtype, device=device)
            return self._input
        out, self._input = self._input, None
        return out
