"""FSDP2's collectives on gloo, in the background of the computation as they are on a GPU's streams.

FSDP2 issues them on streams of their own and goes on. A CPU has no streams: gloo's would block where they are issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parallel.communicate import all_gather_single, sum_parts

IN_FLIGHT = 2
"""Sums at a time; each holds two copies of a unit's gradients."""


class Allocation:
    """Where FSDP2 has its buffers: ordinary memory."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherInBackground(Allocation):
    """An all-gather for ``set_custom_all_gather``; FSDP2 waits for it before it reads the weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        work: dist.Work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        return work


class Exchange(NamedTuple):
    """Parts that are being exchanged, and where their sum belongs."""

    work: dist.Work
    received: Tensor
    sum: Tensor
    ranks: int


class SumInBackground(Allocation):
    """A reduce-scatter for ``set_custom_reduce_scatter``: exchanges parts, and sums this rank's later.

    FSDP2 only makes views of the sum, unless it casts it, adds to it or sums it over replicas; ``at_once`` then.
    """

    def __init__(self) -> None:
        self.at_once = False
        """True where the sum is read as soon as it is returned."""
        self._exchanges: deque[Exchange] = deque()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, f"FSDP2 asked for {op}, and only sums are done"
        received = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)
        self._exchanges.append(Exchange(work, received, output_tensor, group.size()))
        self.finish(left=0 if self.at_once else IN_FLIGHT)

    def finish(self, left: int = 0) -> None:
        """Wait until at most ``left`` sums are not complete."""
        while len(self._exchanges) > left:
            exchange = self._exchanges.popleft()
            exchange.work.wait()
            sum_parts(exchange.received.view(exchange.ranks, -1), out=exchange.sum)
