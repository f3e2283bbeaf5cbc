"""The layers of each pipeline stage, and the stages of each rank."""

from __future__ import annotations

from functools import lru_cache

from fourfold.config.model import ModelConfig
from fourfold.config.run import ParallelConfig

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules in which a rank has one stage."""

FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules that run all forwards of a step before its first backward."""

IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run micro-batches in rounds of pp (Narayanan et al. 2021, arXiv 2104.04473)."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which rank r of p has the stages r and 2p − 1 − r, so that the first and last stage meet on rank 0."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute weight gradients apart from input gradients (Qi et al. 2024, arXiv 2401.10241)."""


def stages_per_rank(grid: ParallelConfig) -> int:
    """Count the stages of one rank of pp."""
    if grid.pp == 1 or grid.schedule in ONE_STAGE:
        return 1
    return 2 if grid.schedule in V_SHAPED else grid.stages_per_rank


def splits_backward(grid: ParallelConfig) -> bool:
    """True where weight gradients are computed apart from input gradients."""
    return grid.pp > 1 and grid.schedule in SPLIT_BACKWARD


def rank_of_stage(stage: int, grid: ParallelConfig) -> int:
    """The rank of pp that has a stage: ranks take turns, or go down the stages and up again."""
    if grid.schedule in V_SHAPED:
        return min(stage, 2 * grid.pp - 1 - stage)
    return stage % grid.pp


def stage_layers(model: ModelConfig, grid: ParallelConfig) -> list[range]:
    """The layers of every stage: those of ``parallel.layers_per_stage``, or such that the largest stage is smallest."""
    counts = grid.layers_per_stage
    if counts is None:
        embedding = model.padded_vocab_size * model.hidden_size / model.active_parameters_per_layer
        counts = balanced(model.num_hidden_layers, grid.pp * stages_per_rank(grid), embedding, embedding)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@lru_cache
def balanced(layers: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Balance the layers over the stages, where the first has ``first`` layers' worth of extra work, the last ``last``.

    A weight of the head costs one multiplication per token, like one of a layer. A weight of the embedding costs none,
    but it and its optimizer states fill the memory of the first stage, which also holds the most micro-batches.
    """
    counts, work = [1] * stages, [1.0] * stages
    work[0] += first
    work[-1] += last
    for _ in range(layers - stages):
        # The least loaded; among equals the one in the middle, since the ends hold the embedding and the head.
        at = min(range(stages), key=lambda i: (work[i], abs(2 * i - stages + 1)))
        counts[at] += 1
        work[at] += 1.0
    return tuple(counts)
