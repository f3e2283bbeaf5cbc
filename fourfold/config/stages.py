"""Compute which layers each pipeline stage has, and which rank has each stage."""

from functools import lru_cache

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import active_parameters_per_layer
from fourfold.config.run import ParallelConfig

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""

FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules that run all forward passes of a step before its first backward pass."""

IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run the micro-batches in rounds of at least pp micro-batches each (Narayanan et al. 2021, arXiv
2104.04473)."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that give each rank two stages. Rank r of p ranks has the stages r and 2p − 1 − r, so rank 0 has the first
and the last stage."""

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

    Stages are dealt out to the ranks 0, 1, …, pp − 1, and then again from rank 0. In V-shaped schedules, the second
    round goes back from rank pp − 1 to rank 0.
    """
    if grid.schedule in V_SHAPED:
        return min(stage, 2 * grid.pp - 1 - stage)
    return stage % grid.pp


def stage_layers(model: ModelConfig, grid: ParallelConfig) -> list[range]:
    """Return the indices of the layers in each stage.

    ``parallel.layers_per_stage`` sets the number of layers per stage. By default, ``balanced`` computes these numbers.
    """
    counts = grid.layers_per_stage
    if counts is None:
        embedding = model.padded_vocab_size * model.hidden_size / active_parameters_per_layer(model)
        last = embedding + model.num_nextn_predict_layers * (1 + embedding)
        counts = balanced(model.num_hidden_layers, grid.pp * stages_per_rank(grid), embedding, last)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@lru_cache
def balanced(layers: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Divide layers among stages, and return the number of layers of each stage. The busiest stage gets as little work
    as possible.

    The first stage also holds the embedding, which counts as ``first`` layers. The last stage also holds the head,
    which counts as ``last`` layers.

    The head counts because it takes time: each of its weights costs one multiplication per token, like a weight of a
    layer. The embedding takes hardly any time. The embedding counts because of memory: the first stage stores the
    embedding's weights and optimizer states, and also the activations of the most micro-batches.
    """
    counts, work = [1] * stages, [1.0] * stages
    work[0] += first
    work[-1] += last
    for _ in range(layers - stages):
        # Add a layer to the stage with the least work. In a tie, choose the stage nearest the middle.
        at = min(range(stages), key=lambda i: (work[i], abs(2 * i - stages + 1)))
        counts[at] += 1
        work[at] += 1.0
    return tuple(counts)
