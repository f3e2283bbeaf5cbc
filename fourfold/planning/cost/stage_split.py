"""The number of blocks on each rank of a pipeline: the split of ``config.stages``, for many layouts at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fourfold.config.stages import balanced
from fourfold.planning.cases import Number, unique_rows
from fourfold.planning.workload import Workload


class Split(NamedTuple):
    """Blocks of the first rank, the second, the last, and of the fullest, with the first place that has so many."""

    first: Number
    second: Number
    last: Number
    most: Number
    most_at: Number


def split_of(work: Workload) -> Split:
    """Count the blocks of the ranks for every case."""
    layout = work.layout
    v_shaped = layout.v_shaped
    cases = np.broadcast_arrays(work.model.layers, layout.pp, layout.interleave, v_shaped, layout.ends)
    if not any(np.ndim(case) for case in cases):
        return Split(*_split(*(float(case) for case in cases), layout.layers_per_stage))
    # Layouts of one model differ in few of these numbers.
    first, back = unique_rows(cases)
    table = np.stack([case[first].astype(float) for case in cases], axis=1)
    found = np.array([_split(*row, None) for row in table.tolist()])
    return Split(*found.T[:, back])


def blocks_of(work: Workload) -> tuple[int, ...]:
    """Count the blocks of each rank of pp, all its stages together, for a single layout."""
    layout = work.layout
    return blocks_of_ranks(int(work.model.layers), int(layout.pp), int(layout.interleave), bool(layout.v_shaped),
                           float(layout.ends), layout.layers_per_stage)  # fmt: skip


def dense_blocks_of(work: Workload, rank: Number) -> Number:
    """Count, for every case, a rank's blocks without experts, which are the first of the model."""
    model, layout = work.model, work.layout
    dense = np.rint(model.layers * (1 - model.sparse))
    cases = np.broadcast_arrays(
        model.layers, layout.pp, layout.interleave, layout.v_shaped, layout.ends, dense, rank
    )  # fmt: skip
    if not any(np.ndim(case) for case in cases):
        return _dense_blocks(*(float(case) for case in cases), layout.layers_per_stage)
    first, back = unique_rows(cases)
    table = np.stack([case[first].astype(float) for case in cases], axis=1)
    return np.array([_dense_blocks(*row, None) for row in table.tolist()])[back]


@lru_cache(maxsize=4096)
def _dense_blocks(
    layers: float, pp: float, interleave: float, v_shaped: float, ends: float, dense: float, rank: float,
    counts: tuple[int, ...] | None,
) -> int:  # fmt: skip
    stages = int(pp * interleave)
    if stages > layers:  # refused elsewhere
        return 0
    counts, left = counts or balanced(int(layers), stages, ends, ends), int(dense)
    found = 0
    for stage, count in enumerate(counts):
        here = min(left, count)
        found += here * (_rank_of(stage, int(pp), stages, bool(v_shaped)) == rank)
        left -= here
    return found


@lru_cache(maxsize=4096)
def _split(
    layers: float, pp: float, interleave: float, v_shaped: float, ends: float, counts: tuple[int, ...] | None
) -> tuple[int, int, int, int, int]:
    ranks = blocks_of_ranks(int(layers), int(pp), int(interleave), bool(v_shaped), ends, counts)
    return ranks[0], ranks[min(1, len(ranks) - 1)], ranks[-1], max(ranks), ranks.index(max(ranks))


@lru_cache(maxsize=4096)
def blocks_of_ranks(
    layers: int, pp: int, interleave: int, v_shaped: bool, ends: float, counts: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Blocks of each rank of pp, all its stages together."""
    stages = pp * interleave
    if stages > layers:  # refused elsewhere
        return (-(-layers // pp),) * pp
    counts = counts or balanced(layers, stages, ends, ends)
    ranks = [0] * pp
    for stage, count in enumerate(counts):
        ranks[_rank_of(stage, pp, stages, v_shaped)] += count
    return tuple(ranks)


def _rank_of(stage: int, pp: int, stages: int, v_shaped: bool) -> int:
    return min(stage, stages - 1 - stage) if v_shaped else stage % pp
