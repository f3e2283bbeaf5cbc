"""Compute, for many layouts at once, the number of blocks and the number of micro-batches in flight on each pipeline
rank. The blocks are divided over the ranks as in ``config.stages``."""

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fourfold.config.stages import balanced
from fourfold.planning.array_fields import Number, unique_rows
from fourfold.planning.workload import SCHEDULES, Workload


class Blocks(NamedTuple):
    """Numbers of blocks on one pipeline rank.

    - number: all blocks of the rank.
    - dense: blocks of an MoE model that have a dense MLP.
    - linear: blocks with linear attention.
    - after_linear: blocks in the rank's last stage that come after the last block with linear attention.
    """

    number: Number
    dense: Number
    linear: Number = 0
    after_linear: Number = 0


class StageSplit(NamedTuple):
    """Numbers of blocks on the pipeline ranks that may need the most time or memory.

    - first, last: blocks of the first and of the last rank.
    - most: number of blocks on the rank with the most blocks.
    - between: the number and the blocks of each rank that may need the most memory, except the first and the last rank.
      If a case (such as a layout) has fewer of these ranks than another case, its unused entries have rank 0 and no
      blocks.
    """

    first: Blocks
    last: Blocks
    most: Number
    between: list[tuple[Number, Blocks]]


def split_of(work: Workload) -> StageSplit:
    """Return the blocks of the pipeline ranks that may need the most time or memory, for each case of ``work``."""
    model, layout = work.model, work.layout
    blocks = (model.num_hidden_layers, model.predictions, model.dense_first, model.own_linear)
    cases = np.broadcast_arrays(*blocks, layout.pp, layout.stages_per_rank, layout.v_shaped, layout.end_layers)
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
    """Return the numbers of blocks on each pipeline rank for a single layout, summed over the stages of the rank."""
    model, layout = work.model, work.layout
    return blocks_of_ranks(int(model.num_hidden_layers), int(model.predictions), int(model.dense_first),
                           float(model.own_linear), int(layout.pp), int(layout.stages_per_rank), bool(layout.v_shaped),
                           float(layout.end_layers), layout.layers_per_stage)  # fmt: skip


def in_flight(work: Workload, rank: Number) -> Number:
    """Return the largest number of micro-batches whose activations are on a pipeline rank at the same time.

    Let m be the number of micro-batches of a step, p the number of pipeline ranks, and v the number of stages per rank.
    Ranks are numbered from 0. A micro-batch counts as 1/v for each stage of the rank that holds activations of the
    micro-batch. Interleaved schedules run the micro-batches in rounds. A round has r = m // (m // p) micro-batches, or
    r = m if m < p. If p divides m, r is p.

    - 1F1B: p − rank.
    - Interleaved1F1B: ((v − 1)·r + 2(p − rank) − 1) / v (Narayanan et al. 2021, arXiv 2104.04473).
    - InterleavedZeroBubble: ((v − 1)·r + p) / v. Activations stay in memory until the weight gradients are computed.
    - ZBVZeroBubble: p, or (m + 1 + rank) / 2 if this is less.
    - DualPipeV: p + ½.
    - GPipe and LoopedBFS: m.

    In interleaved schedules, the result is at least 1. In all schedules, the result is at most m. Without a pipeline,
    the result is 1.
    """
    layout = work.layout
    behind, micro_batches = layout.pp - rank, work.micro_batches
    in_a_round = micro_batches // np.maximum(micro_batches // layout.pp, 1)
    earlier = (layout.stages_per_rank - 1) * in_a_round
    chunks = earlier + np.where(layout.split_backward, layout.pp, 2 * behind - 1)
    held = np.where(layout.stages_per_rank > 1, np.maximum(chunks / layout.stages_per_rank, 1), behind)
    is_one = [np.equal(layout.schedule, SCHEDULES.index(name)) for name in ("ZBVZeroBubble", "DualPipeV")]
    held = np.select(is_one, [np.minimum(layout.pp, (micro_batches + 1 + rank) / 2), layout.pp + 0.5], held)
    held = np.where(layout.forwards_first, micro_batches, held)
    return np.minimum(np.where(layout.pp > 1, held, 1), micro_batches)


@lru_cache(maxsize=4096)
def _split(
    layers: float, predictions: float, dense: float, linear: float, pp: float, stages_per_rank: float, v_shaped: float,
    ends: float, counts: tuple[int, ...] | None,
) -> tuple[Number, ...]:  # fmt: skip
    """Return the values of a ``StageSplit`` as one row of numbers.

    The row leaves out a rank between the first and the last rank if an earlier rank has at least as many blocks of each
    kind. The earlier rank needs at least as much memory, because it holds at least as many micro-batches.
    """
    ranks = blocks_of_ranks(
        int(layers), int(predictions), int(dense), linear, int(pp), int(stages_per_rank), v_shaped > 0, ends, counts
    )
    fullest, between = {ranks[0]}, []
    for place, blocks in enumerate(ranks[1:-1], 1):
        if not any(all(map(operator.le, _kinds(blocks), _kinds(other))) for other in fullest):
            fullest.add(blocks)
            between += [place, *blocks]
    return (*ranks[0], *ranks[-1], max(blocks.number for blocks in ranks), *between)


def _kinds(blocks: Blocks) -> tuple[Number, ...]:
    """Return the numbers of blocks with and without a dense MLP, and with and without linear attention."""
    return blocks.dense, blocks.number - blocks.dense, blocks.linear, blocks.number - blocks.linear


@lru_cache(maxsize=4096)
def blocks_of_ranks(
    layers: int, predictions: int, dense: int, linear: float, pp: int, stages_per_rank: int, v_shaped: bool,
    ends: float, counts: tuple[int, ...] | None = None,
) -> tuple[Blocks, ...]:  # fmt: skip
    """Return the numbers of blocks on each pipeline rank, summed over the stages of the rank.

    Args:
        layers: Number of blocks of the model, including the prediction layers.
        predictions: Number of prediction layers. They are in the last stage.
        dense: Number of blocks that have a dense MLP in an MoE model. These are the model's first blocks. 0 for other
            models.
        linear: Fraction of the blocks, without the prediction layers, that have linear attention. If one block in n has
            softmax attention, it is the last block of each group of n blocks, as in Qwen3-Next.
        pp: Number of pipeline ranks.
        stages_per_rank: Number of stages per rank.
        v_shaped: Whether the first and the last stage are both on the first rank.
        ends: How many blocks the embedding counts as when blocks are divided into stages. The head counts as the same
            number of blocks.
        counts: Number of blocks in each stage, without prediction layers. Default: divide the blocks evenly, as
            ``ends`` says.
    """
    stages, own = pp * stages_per_rank, layers - predictions
    if stages > own:
        # This layout is illegal, so any counts will do.
        return (Blocks(-(-layers // pp), 0),) * pp
    kinds = [int((i + 1) * (1 - linear) + 1e-6) == int(i * (1 - linear) + 1e-6) for i in range(own)]
    kinds += kinds[-1:] * predictions
    of_ranks, begin = [Blocks(0, 0)] * pp, 0
    counts = counts or balanced(own, stages, ends, ends + predictions * (1 + ends))
    for stage, count in enumerate([*counts[:-1], counts[-1] + predictions]):
        rank = min(stage, stages - 1 - stage) if v_shaped else stage % pp
        are_linear, before = kinds[begin : begin + count], of_ranks[rank]
        of_dense, after = min(max(dense - begin, 0), count), [*are_linear[::-1], True].index(True)
        of_ranks[rank] = Blocks(before.number + count, before.dense + of_dense, before.linear + sum(are_linear), after)
        begin += count
    return tuple(of_ranks)
