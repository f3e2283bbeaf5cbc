"""Compute the number of blocks on each pipeline rank for many layouts at once, with the split of ``config.stages``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fourfold.config.stages import balanced
from fourfold.planning.array_fields import Number, unique_rows
from fourfold.planning.workload import Workload


class Blocks(NamedTuple):
    """The number of blocks on one rank.

    ``dense`` counts the blocks of an MoE model that have a dense MLP.
    """

    number: Number
    dense: Number


class StageSplit(NamedTuple):
    """Block counts of some pipeline ranks.

    - first, last: blocks of the first and of the last rank.
    - most: number of blocks on the rank with the most blocks.
    - between: other ranks that may need the most memory, each with its blocks. If a case has fewer of them than other
      cases, its remaining entries are rank 0 with no blocks.
    """

    first: Blocks
    last: Blocks
    most: Number
    between: list[tuple[Number, Blocks]]


def split_of(work: Workload) -> StageSplit:
    """Return the split of the blocks over pipeline ranks for each case."""
    layout = work.layout
    v_shaped = layout.v_shaped
    cases = np.broadcast_arrays(
        work.model.num_hidden_layers,
        work.model.dense_first,
        layout.pp,
        layout.stages_per_rank,
        v_shaped,
        layout.end_layers,
    )
    if not any(np.ndim(case) for case in cases):
        return _as_split(_split(*(float(case) for case in cases), layout.layers_per_stage))
    # The layouts of a model have few distinct combinations of these values, so compute each combination once.
    first, back = unique_rows(cases)
    table = np.stack([case[first].astype(float) for case in cases], axis=1)
    found = [_split(*row, None) for row in table.tolist()]
    longest = max(map(len, found))
    return _as_split(np.array([row + (0,) * (longest - len(row)) for row in found]).T[:, back])


def _as_split(row: Sequence[Number] | np.ndarray) -> StageSplit:
    places = [(row[i], Blocks(row[i + 1], row[i + 2])) for i in range(5, len(row), 3)]
    return StageSplit(Blocks(row[0], row[1]), Blocks(row[2], row[3]), row[4], places)


def blocks_of(work: Workload) -> tuple[Blocks, ...]:
    """Return the blocks on each pipeline rank, summed over its stages, for a single layout."""
    model, layout = work.model, work.layout
    return blocks_of_ranks(int(model.num_hidden_layers), int(model.dense_first), int(layout.pp),
                           int(layout.stages_per_rank), bool(layout.v_shaped), float(layout.end_layers),
                           layout.layers_per_stage)  # fmt: skip


@lru_cache(maxsize=4096)
def _split(
    layers: float, dense: float, pp: float, stages_per_rank: float, v_shaped: float, ends: float,
    counts: tuple[int, ...] | None,
) -> tuple[Number, ...]:  # fmt: skip
    """Return the values of a ``StageSplit`` as one row.

    Earlier ranks hold at least as many micro-batches as later ranks. So a rank between the first and the last is
    skipped if an earlier rank also has at least as many blocks of each kind.
    """
    ranks = blocks_of_ranks(int(layers), int(dense), int(pp), int(stages_per_rank), bool(v_shaped), ends, counts)
    fullest, between = {ranks[0]}, []
    for place, blocks in enumerate(ranks[1:-1], 1):
        if not any(blocks.dense <= b.dense and blocks.number - blocks.dense <= b.number - b.dense for b in fullest):
            fullest.add(blocks)
            between += [place, *blocks]
    return (*ranks[0], *ranks[-1], max(blocks.number for blocks in ranks), *between)


@lru_cache(maxsize=4096)
def blocks_of_ranks(
    layers: int, dense: int, pp: int, stages_per_rank: int, v_shaped: bool, ends: float,
    counts: tuple[int, ...] | None = None,
) -> tuple[Blocks, ...]:  # fmt: skip
    """Return the blocks on each pipeline rank, summed over its stages.

    Args:
        layers: Number of blocks of the model.
        dense: Number of blocks of an MoE model that have a dense MLP. They are the first blocks.
        pp: Number of pipeline ranks.
        stages_per_rank: Number of stages per rank.
        v_shaped: Whether the first and the last stage are both on the first rank.
        ends: How many blocks the embedding counts as when blocks are divided into stages. The head counts as the same
            number of blocks.
        counts: Number of blocks in each stage. None divides the blocks evenly.
    """
    stages = pp * stages_per_rank
    # This layout is illegal, so any counts will do.
    if stages > layers:
        return (Blocks(-(-layers // pp), 0),) * pp
    numbers, of_dense, begin = [0] * pp, [0] * pp, 0
    for stage, count in enumerate(counts or balanced(layers, stages, ends, ends)):
        rank = min(stage, stages - 1 - stage) if v_shaped else stage % pp
        numbers[rank] += count
        of_dense[rank] += min(max(dense - begin, 0), count)
        begin += count
    return tuple(map(Blocks, numbers, of_dense))
