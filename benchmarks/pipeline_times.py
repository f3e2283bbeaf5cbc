"""Compute when each operation of a pipeline runs, and how long the pipeline's ranks wait."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.config.run import ParallelConfig
from fourfold.config.stages import stages_per_rank
from fourfold.parallel.pipeline.schedule import Op, alternatives_of, simulate


class Span(NamedTuple):
    """When an operation of a pipeline begins and ends."""

    op: Op
    begin: float
    end: float


def timeline(ops: Sequence[Sequence[Op]], grid: ParallelConfig, backward: float = 2.0) -> list[list[Span]]:
    """Simulate a schedule, and return when each operation runs. The unit of time is the forward pass of a micro-batch
    through all stages of a rank. A backward pass takes ``backward``. If it is split into two operations, each takes
    half of this time. Transfers take no time."""
    seconds = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
    chunks = stages_per_rank(grid)
    spans: list[list[Span]] = [[] for _ in ops]
    ends: dict[Op, float] = {}

    def run(rank: int, op: Op) -> None:
        free = spans[rank][-1].end if spans[rank] else 0.0
        needed = itertools.chain(*alternatives_of(op, grid))
        begin = max([free, *(ends[each] for each in needed if each in ends)])
        ends[op] = begin + seconds[op.kind] / chunks
        spans[rank].append(Span(op, begin, ends[op]))

    simulate(ops, grid, run)
    return spans


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the fraction of time that a rank spends waiting, averaged over the ranks."""
    begin, end = min(s[0].begin for s in spans), max(s[-1].end for s in spans)
    busy = sum(span.end - span.begin for rank in spans for span in rank)
    return 1 - busy / (len(spans) * (end - begin))
