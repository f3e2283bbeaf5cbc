"""Run FSDP2's collectives on gloo while the CPU computes.

On a GPU, FSDP2 starts collectives on separate CUDA streams, so they overlap with computation. A CPU has no streams. So
without this module, FSDP2 would wait for each of gloo's collectives.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.parallel.data.fsdp_in_levels import Allocation
from fourfold.parallel.grid.communicate import all_gather_single, sum_parts
from fourfold.parallel.grid.grid import TwoLevels
from fourfold.torch_internals import MeshWithGroups

IN_FLIGHT = 2
"""Largest number of gradient sums in flight. Each sum needs memory for two copies of the gradients of a unit
(``Units``)."""


class GatherInBackground(Allocation):
    """An asynchronous all-gather for FSDP2's ``set_custom_all_gather``.

    FSDP2 waits for the all-gather only when it needs the weights. With two levels, a thread waits for the first level,
    and then starts the second level.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | TwoLevels, async_op: bool = False
    ) -> dist.Work:
        if not isinstance(group, TwoLevels):
            return _gather(output_tensor, input_tensor, group)
        mine = output_tensor.view(group.inside.size, -1)[group.inside.rank]
        first = _gather(mine, input_tensor, group.across.group)

        def then() -> dist.Work:
            first.wait()
            return _gather(output_tensor, mine, group.inside.group)

        return OneAfterTheOther(first, group.gathers.submit(then))


def _gather(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    return all_gather_single(out, part, group=group, async_op=True)


class OneAfterTheOther(dist.Work):
    """A handle for two collectives. The second collective starts when the first collective is complete."""

    def __init__(self, first: dist.Work, second: Future[dist.Work]) -> None:
        super().__init__()
        self._first, self._second = first, second

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._first.wait() and self._second.result().wait()


class Exchange(NamedTuple):
    """A reduce-scatter in flight. It is an all-to-all, followed by a sum of the received parts into ``sum``."""

    work: dist.Work
    received: Tensor
    ranks: int
    sum: Tensor
    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard. If given, an all-reduce over them must follow."""

    @classmethod
    def start(cls, parts: Tensor, group: dist.ProcessGroup, out: Tensor) -> Exchange:
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=group, async_op=True)
        return cls(work, received, group.size(), out)

    def finish(self) -> Tensor:
        self.work.wait()
        return sum_parts(self.received.view(self.ranks, -1), out=self.sum)


class InsideNode(NamedTuple):
    """The first level of a reduce-scatter in two levels. The first level computes this node's sum. The second level
    adds the sums of all nodes, and writes the result to ``sum``."""

    exchange: Exchange
    nodes: dist.ProcessGroup
    sum: Tensor
    replicas: dist.ProcessGroup | None = None
    """The ranks with the same shard, as in ``Exchange``."""


def _all_reduce(sum: Tensor, replicas: dist.ProcessGroup) -> dist.Work:
    work: dist.Work = dist.all_reduce(sum, group=replicas, async_op=True)
    return work


class SumInBackground(Allocation):
    """A reduce-scatter for FSDP2's ``set_custom_reduce_scatter``. It starts an all-to-all, and sums the received parts
    later.

    With two levels, the nodes then exchange their sums. If there are replicas, an all-reduce over them follows in the
    background (``all_reduce``).

    The result is returned before the sum is complete. This is safe as long as FSDP2 only makes views of the result. If
    FSDP2 will read the result, set ``at_once`` or ``at_once_over_shards``.
    """

    def __init__(self) -> None:
        self.at_once = False
        """Whether to wait until each sum is complete before it is returned."""
        self.at_once_over_shards = False
        """Whether to wait until each sum over the shard group is complete before it is returned. The sum over replicas
        may still be in flight."""
        self._inside: deque[InsideNode] = deque()
        self._exchanges: deque[Exchange] = deque()
        self._all_reduces: list[dist.Work] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup | TwoLevels,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, f"FSDP2 requested {op}; only sums are supported"
        if isinstance(group, TwoLevels):
            inside = group.inside_for_sums
            of_node = input_tensor.new_empty(input_tensor.numel() // inside.size)
            exchange = Exchange.start(input_tensor, inside.group, of_node)
            self._inside.append(InsideNode(exchange, group.across.group, output_tensor))
        else:
            self._exchanges.append(Exchange.start(input_tensor, group, output_tensor))
        self._finish(left=0 if self.at_once or self.at_once_over_shards else IN_FLIGHT)

    def all_reduce(self, sum: Tensor, replicas: dist.ProcessGroup) -> None:
        """As soon as the reduce-scatter that computes ``sum`` is complete, start an all-reduce of ``sum`` over the
        replicas. This method does not wait, unless ``at_once`` is set."""
        if self._inside and self._inside[-1].sum is sum:
            self._inside[-1] = self._inside[-1]._replace(replicas=replicas)
        elif self._exchanges and self._exchanges[-1].sum is sum:
            self._exchanges[-1] = self._exchanges[-1]._replace(replicas=replicas)
        else:
            self._all_reduces.append(_all_reduce(sum, replicas))
        if self.at_once:
            self.finish()

    def finish(self) -> None:
        """Wait until all sums are complete."""
        self._finish(left=0)
        for work in self._all_reduces:
            work.wait()
        self._all_reduces.clear()

    def _finish(self, left: int) -> None:
        """Wait until at most ``left`` reduce-scatters are in flight. A reduce-scatter in its first level counts too."""
        while len(self._inside) > min(left, 1):
            inside = self._inside.popleft()
            across = Exchange.start(inside.exchange.finish(), inside.nodes, inside.sum)
            self._exchanges.append(across._replace(replicas=inside.replicas))
        while len(self._inside) + len(self._exchanges) > left:
            exchange = self._exchanges.popleft()
            of_shards = exchange.finish()
            if exchange.replicas is not None:
                self._all_reduces.append(_all_reduce(of_shards, exchange.replicas))


class ReplicasInBackground:
    """Replaces the process group of a shard's replicas, so that all-reduces over this group run in the background.

    FSDP2 calls only the methods defined here. This object must compare equal to the real group, because torch looks up
    the group when it formats an error message.
    """

    def __init__(self, group: dist.ProcessGroup, sums: SumInBackground) -> None:
        self._group, self._sums = group, sums

    def __eq__(self, other: object) -> bool:
        return other is self._group or other is self

    def __hash__(self) -> int:
        return hash(self._group)

    def size(self) -> int:
        return self._group.size()

    def rank(self) -> int:
        return self._group.rank()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:
        assert options.reduceOp == dist.ReduceOp(dist.ReduceOp.SUM), (
            f"FSDP2 requested {options.reduceOp}; only sums are supported"
        )
        (sum,) = tensors
        self._sums.all_reduce(sum, self._group)


def replicas_in_background(mesh: DeviceMesh, sums: SumInBackground) -> DeviceMesh:
    """Return a mesh (replicas, shards) whose all-reduces over the first dim run in the background."""
    return MeshWithGroups(mesh, {0: ReplicasInBackground(mesh.get_group(0), sums)})
