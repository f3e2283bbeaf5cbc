"""Compute the number of blocks on each pipeline rank for many layouts at once, with the split of ``config.stages``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fourfold.config.stages import balanced
from fourfold.planning.array_fields import Number, unique_rows
from fourfold.planning.workload import Workload


class Blocks(NamedTuple):
    """The number of blocks on one rank.

    - dense: blocks of an MoE model that have a dense MLP.
    - linear: blocks with linear attention.
    - after_linear: blocks after the last block with linear attention, in the rank's last stage.
    """

    number: Number
    dense: Number
    linear: Number = 0
    after_linear: Number = 0


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
        work.model.linear,
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
    places = [(row[i], Blocks(*row[i + 1 : i + 5])) for i in range(9, len(row), 5)]
    return StageSplit(Blocks(*row[:4]), Blocks(*row[4:8]), row[8], places)


def blocks_of(work: Workload) -> tuple[Blocks, ...]:
    """Return the blocks on each pipeline rank, summed over its stages, for a single layout."""
    model, layout = work.model, work.layout
    return blocks_of_ranks(int(model.num_hidden_layers), int(model.dense_first), float(model.linear), int(layout.pp),
                           int(layout.stages_per_rank), bool(layout.v_shaped), float(layout.end_layers),
                           layout.layers_per_stage)  # fmt: skip


@lru_cache(maxsize=4096)
def _split(
    layers: float, dense: float, linear: float, pp: float, stages_per_rank: float, v_shaped: float, ends: float,
    counts: tuple[int, ...] | None,
) -> tuple[Number, ...]:  # fmt: skip
    """Return the values of a ``StageSplit`` as one row.

    Earlier ranks hold at least as many micro-batches as later ranks. So a rank between the first and the last is
    skipped if an earlier rank also has at least as many blocks of each kind.
    """
    ranks = blocks_of_ranks(
        int(layers), int(dense), linear, int(pp), int(stages_per_rank), bool(v_shaped), ends, counts
    )
    fullest, between = {ranks[0]}, []
    for place, blocks in enumerate(ranks[1:-1], 1):
        if not any(_has_at_most(blocks, other) for other in fullest):
            fullest.add(blocks)
            between += [place, *blocks]
    return (*ranks[0], *ranks[-1], max(blocks.number for blocks in ranks), *between)


def _has_at_most(one: Blocks, other: Blocks) -> bool:
    """Return whether a rank has at most as many blocks of each kind as another rank."""
    own, others = (
        (blocks.dense, blocks.number - blocks.dense, blocks.linear, blocks.number - blocks.linear)
        for blocks in (one, other)
    )
    return all(map(operator.le, own, others))


@lru_cache(maxsize=4096)
def blocks_of_ranks(
    layers: int, dense: int, linear: float, pp: int, stages_per_rank: int, v_shaped: bool, ends: float,
    counts: tuple[int, ...] | None = None,
) -> tuple[Blocks, ...]:  # fmt: skip
    """Return the blocks on each pipeline rank, summed over its stages. A fraction ``linear`` of the model's blocks has
    linear attention. If one block in n has softmax attention, it is the last of n blocks, as in Qwen3-Next."""
    stages = pp * stages_per_rank
    # This layout is illegal, so any counts will do.
    if stages > layers:
        return (Blocks(-(-layers // pp), 0),) * pp
    kinds = [math.floor((i + 1) * (1 - linear) + 1e-6) == math.floor(i * (1 - linear) + 1e-6) for i in range(layers)]
    of_ranks, begin = [Blocks(0, 0)] * pp, 0
    for stage, count in enumerate(counts or balanced(layers, stages, ends, ends)):
        rank = min(stage, stages - 1 - stage) if v_shaped else stage % pp
        are_linear, before = kinds[begin : begin + count], of_ranks[rank]
        of_ranks[rank] = Blocks(
            before.number + count,
            before.dense + min(max(dense - begin, 0), count),
            before.linear + sum(are_linear),
            (are_linear[::-1] + [True]).index(True),
        )
        begin += count
    return tuple(of_ranks)
