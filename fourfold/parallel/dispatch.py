"""Rows of tokens go to the ranks that have their experts, and what these compute comes back.

Each rank sends the rows of its own tokens to the ranks of ep, and only there are those of all ranks of x gathered: no
row is sent twice (TED, Singh et al. 2023, arXiv 2303.06318, section 4.1). Shapes: N rows of (token, choice), h
channels, E experts, of which e are on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.models.autograd import differentiable
from fourfold.parallel.communicate import all_gather, all_to_all, exchange_rows, gather_rows, scatter_sum_rows
from fourfold.parallel.grid import Grid

COUNTS = "experts: counts of rows"


class Traffic(NamedTuple):
    """The numbers of rows that go where, on the host."""

    sent: list[int]
    """Rows of this rank's tokens, for each rank of ep."""
    received: list[int]
    """Rows that each rank of ep has for this rank's experts."""
    over_x: list[int]
    """Rows that each rank of x has received."""
    sizes: list[int]
    """Rows of each of this rank's experts, from all of these."""
    blocks: list[list[int]]
    """The same for each rank of x, and inside it of ep, that they come from."""


class Dispatch:
    """The way of rows to the experts of a grid, and back."""

    def __init__(self, grid: Grid, num_experts: int) -> None:
        self.ep, self.x, self.num_experts = grid.ep, grid.x, num_experts

    def traffic(self, sizes_E: Tensor) -> Traffic:
        """Exchange the counts; the host waits for them. sizes_E: the rows of this rank's tokens for every expert."""
        mine = sizes_E.view(self.ep.size, -1)
        received = all_to_all(mine, self.ep, COUNTS) if self.ep.size > 1 else mine
        everyone = all_gather(received[None], self.x, 0, COUNTS)
        counts = torch.cat([mine, everyone.flatten(0, 1)]).tolist()
        return self._traffic(counts[: self.ep.size], counts[self.ep.size :])

    def planned_traffic(self, sizes_E: Tensor, sizes: Sequence[int]) -> Traffic:
        """The same where every rank sends ``sizes`` rows to the experts, without data to read."""
        mine = sizes_E.view(self.ep.size, -1)
        received = all_to_all(mine, self.ep, COUNTS) if self.ep.size > 1 else mine
        all_gather(received[None], self.x, 0, COUNTS)
        each = self.num_experts // self.ep.size
        of_ranks = [list(sizes[first : first + each]) for first in range(0, self.num_experts, each)]
        return self._traffic(of_ranks, [of_ranks[self.ep.rank]] * (self.x.size * self.ep.size))

    def _traffic(self, mine: list[list[int]], blocks: list[list[int]]) -> Traffic:
        first = self.x.rank * self.ep.size
        of_rank = [sum(block) for block in blocks]
        return Traffic(
            sent=[sum(each) for each in mine],
            received=of_rank[first : first + self.ep.size],
            over_x=[sum(of_rank[begin : begin + self.ep.size]) for begin in range(0, len(of_rank), self.ep.size)],
            sizes=[sum(of_expert) for of_expert in zip(*blocks, strict=True)],
            blocks=blocks,
        )

    def there(self, rows_Nh: Tensor, traffic: Traffic) -> Tensor:
        """From rows sorted by expert to those of this rank's experts, sorted by expert."""
        rows_Nh = exchange_rows(rows_Nh, self.ep, traffic.sent, traffic.received, "experts: dispatch")
        rows_Nh = gather_rows(rows_Nh, self.x, traffic.over_x, "experts: tokens")
        order_N = _by_expert(traffic.blocks, rows_Nh.device)
        return rows_Nh if order_N is None else _permuted(rows_Nh, order_N, _inverse(order_N))

    def back(self, rows_Nh: Tensor, traffic: Traffic) -> Tensor:
        """The reverse of ``there``: rows of which each rank of x has a share of the sum, to those of its tokens."""
        order_N = _by_expert(traffic.blocks, rows_Nh.device)
        rows_Nh = rows_Nh if order_N is None else _permuted(rows_Nh, _inverse(order_N), order_N)
        rows_Nh = scatter_sum_rows(rows_Nh, self.x, traffic.over_x, "experts: outputs")
        return exchange_rows(rows_Nh, self.ep, traffic.received, traffic.sent, "experts: combine")


def _by_expert(blocks: list[list[int]], device: torch.device) -> Tensor | None:
    """The order that sorts blocks of rows, each sorted by expert, by expert as a whole; None where they are."""
    if len(blocks) == 1 or len(blocks[0]) == 1:
        return None
    lengths = torch.tensor(blocks)
    total = sum(map(sum, blocks))
    experts_N = (
        torch.arange(lengths.shape[1]).repeat(len(blocks)).repeat_interleave(lengths.flatten(), output_size=total)
    )
    return experts_N.to(device).argsort(stable=True)


def _inverse(order_N: Tensor) -> Tensor:
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return inverse_N


def _permuted(rows_Nh: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    return differentiable(rows_Nh, lambda rows: rows[order_N], lambda grad, inverse_N: grad[inverse_N], inverse_N)
