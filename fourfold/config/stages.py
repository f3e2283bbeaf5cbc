"""Compute which layers each pipeline stage has, and which rank has each stage."""

from __future__ import annotations

from functools import lru_cache

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import active_parameters_per_layer
from fourfold.config.run import ParallelConfig

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""

FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules that run all forward passes of a step before its first backward pass."""

IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run micro-batches in rounds of as many micro-batches as there are pipeline ranks (Narayanan et al.
2021, arXiv 2104.04473)."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that give rank r of p the stages r and 2p − 1 − r, so that rank 0 has both the first and the last stage."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute weight gradients separately from input gradients (Qi et al. 2024, arXiv 2401.10241)."""


def stages_per_rank(grid: ParallelConfig) -> int:
    """Return the number of stages per pipeline rank."""
    if grid.pp == 1 or grid.schedule in ONE_STAGE:
        return 1
    return 2 if grid.schedule in V_SHAPED else grid.stages_per_rank


def splits_backward(grid: ParallelConfig) -> bool:
    """Return whether the pipeline computes weight gradients separately from input gradients."""
    return grid.pp > 1 and grid.schedule in SPLIT_BACKWARD


def rank_of_stage(stage: int, grid: ParallelConfig) -> int:
    """Return the pipeline rank that runs a stage.

    The ranks get stages in turn. In V-shaped schedules, the order of the ranks is from the first to the last and back.
    """
    if grid.schedule in V_SHAPED:
        return min(stage, 2 * grid.pp - 1 - stage)
    return stage % grid.pp


def stage_layers(model: ModelConfig, grid: ParallelConfig) -> list[range]:
    """Return the layers of every stage.

    ``parallel.layers_per_stage`` sets their number. By default, the stages are balanced so that the stage with the most
    work has as little as possible.
    """
    counts = grid.layers_per_stage
    if counts is None:
        embedding = model.padded_vocab_size * model.hidden_size / active_parameters_per_layer(model)
        counts = balanced(model.num_hidden_layers, grid.pp * stages_per_rank(grid), embedding, embedding)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@lru_cache
def balanced(layers: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the number of layers of each stage, balanced so that the stage with the most work has as little as
    possible.

    The first stage has additional work equal to ``first`` layers, and the last stage has additional work equal to
    ``last`` layers. The head takes time: each of its weights costs one multiplication per token, like a weight of a
    layer. The embedding takes hardly any time, but its weights and their optimizer states fill the memory of the first
    stage, which also holds the most micro-batches. So both count.
    """
    counts, work = [1] * stages, [1.0] * stages
    work[0] += first
    work[-1] += last
    for _ in range(layers - stages):
        # Take the stage with the least work. In a tie, take the stage nearest the middle, because the end stages also
        # hold the embedding and the head.
        at = min(range(stages), key=lambda i: (work[i], abs(2 * i - stages + 1)))
        counts[at] += 1
        work[at] += 1.0
    return tuple(counts)
