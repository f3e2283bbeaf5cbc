"""Send each token to the ranks that have its experts, and bring the results back.

The axis ep splits the experts. The tensor axis x splits the tokens, and also the width of each expert. A token becomes
one row per chosen expert. First, each rank sends the rows of its own tokens to the ranks of ep. Then the ranks of x
gather the received rows from each other. In this order, no row is sent over ep twice (TED, Singh et al. 2023, arXiv
2303.06318, section 4.1).

Shapes: N rows, h channels, E experts, e experts on this rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.models.autograd import differentiable
from fourfold.models.grouped import Groups, HostNumbers
from fourfold.parallel.grid.communicate import all_gather, all_to_all, exchange_rows, gather_rows, scatter_sum_rows
from fourfold.parallel.grid.grid import Grid

COUNTS = "experts: counts of rows"


class Traffic(NamedTuple):
    """The numbers of rows that ranks send and receive, and the order of the received rows. The numbers are on the host,
    because collectives need them there."""

    sent: list[int]
    """Number of rows that this rank sends to each ep rank."""
    received: list[int]
    """Number of rows that this rank receives from each ep rank."""
    over_x: list[int]
    """Number of rows that each x rank has received over ep."""
    groups: Groups
    """How many rows each expert on this rank gets from all ranks together, after the all-gather over x."""
    order_N: Tensor | None
    """The permutation that sorts the gathered rows by expert. None if they are already sorted."""
    inverse_N: Tensor | None
    """The inverse permutation of ``order_N``, or None if ``order_N`` is None."""


class Dispatch:
    """Sends each row to the ranks that have its expert, and sends the expert's output back.

    A row is one token for one of its chosen experts.
    """

    def __init__(self, grid: Grid, num_experts: int) -> None:
        self.ep, self.x, self.num_experts = grid.ep, grid.x, num_experts

    def exchange_counts(self, sizes_E: Tensor) -> HostNumbers:
        """Tell the other ranks how many rows they will receive, and start copying all counts to the host.

        Args:
            sizes_E: Number of rows that this rank's tokens send to each expert.

        Returns:
            The counts, [ep + x · ep, e], with one column for each of the e experts of an ep rank. The first ep entries
            count the rows that this rank sends to each ep rank. Then there are ep entries for each x rank. They count
            the rows that this x rank receives from each ep rank.
        """
        mine = sizes_E.view(self.ep.size, -1)
        received = all_to_all(mine, self.ep, COUNTS) if self.ep.size > 1 else mine
        everyone = all_gather(received[None], self.x, 0, COUNTS)
        return HostNumbers(torch.cat([mine, everyone.flatten(0, 1)]))

    def traffic(self, counts: HostNumbers, planned: Sequence[int] | None) -> Traffic:
        """Compute how many rows to send and receive. This waits for the counts, because collectives need them on the
        host.

        Args:
            counts: The result of ``exchange_counts``.
            planned: Number of rows that every rank is assumed to send to each expert. Only ``fourfold trace`` passes
                this, because a trace has no data to count.
        """
        if planned is None:
            numbers: list[Any] = counts.read()
            mine, blocks = numbers[: self.ep.size], numbers[self.ep.size :]
        else:
            each = self.num_experts // self.ep.size
            mine = [list(planned[first : first + each]) for first in range(0, self.num_experts, each)]
            blocks = [mine[self.ep.rank]] * (self.x.size * self.ep.size)
        first = self.x.rank * self.ep.size
        of_rank = [sum(block) for block in blocks]
        blocks_Be = counts.on_device[self.ep.size :]
        order_N = None
        if len(blocks) > 1 and len(blocks[0]) > 1:
            order_N = _by_expert(blocks_Be, sum(of_rank))
        return Traffic(
            sent=[sum(each) for each in mine],
            received=of_rank[first : first + self.ep.size],
            over_x=[sum(of_rank[begin : begin + self.ep.size]) for begin in range(0, len(of_rank), self.ep.size)],
            groups=Groups(blocks_Be.sum(0), [sum(of_expert) for of_expert in zip(*blocks, strict=True)]),
            order_N=order_N,
            inverse_N=None if order_N is None else _inverse(order_N),
        )

    def to_experts(self, rows_Nh: Tensor, traffic: Traffic) -> Tensor:
        """Send each row to the ranks that have its expert. The given rows must be sorted by expert.

        Returns:
            All rows for the experts on this rank, sorted by expert.
        """
        rows_Nh = exchange_rows(rows_Nh, self.ep, traffic.sent, traffic.received, "experts: dispatch")
        rows_Nh = gather_rows(rows_Nh, self.x, traffic.over_x, "experts: tokens")
        return _permuted(rows_Nh, traffic.order_N, traffic.inverse_N)

    def from_experts(self, rows_Nh: Tensor, traffic: Traffic) -> Tensor:
        """Send the experts' outputs back. Each rank gets the outputs for the rows of its own tokens.

        The given rows are partial sums, because x splits the width of the experts. This method sums them over x.
        """
        rows_Nh = _permuted(rows_Nh, traffic.inverse_N, traffic.order_N)
        rows_Nh = scatter_sum_rows(rows_Nh, self.x, traffic.over_x, "experts: outputs")
        return exchange_rows(rows_Nh, self.ep, traffic.received, traffic.sent, "experts: combine")


def _by_expert(counts_Be: Tensor, total: int) -> Tensor:
    """Return the permutation that sorts rows by expert.

    Args:
        counts_Be: Number of rows per expert in each block of rows. In a block, the rows are already sorted by expert.
        total: Number of rows in all blocks.
    """
    blocks, experts = counts_Be.shape
    experts_N = torch.arange(experts, device=counts_Be.device).repeat(blocks)
    return experts_N.repeat_interleave(counts_Be.flatten(), output_size=total).argsort(stable=True)


def _inverse(order_N: Tensor) -> Tensor:
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def _permuted(rows_Nh: Tensor, order_N: Tensor | None, inverse_N: Tensor | None) -> Tensor:
    if order_N is None:
        return rows_Nh
    return differentiable(rows_Nh, lambda rows: rows[order_N], lambda grad, inverse_N: grad[inverse_N], inverse_N)
