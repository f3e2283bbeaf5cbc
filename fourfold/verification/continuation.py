"""Extrapolate the trace of a large run from the traces of a few small runs.

All layers are alike, and all micro-batches are alike. So the bytes that a step sends are linear in the number of layers
and in the number of micro-batches. Memory is linear in the number of layers and in the number of micro-batches in
flight. With the 1F1B schedule, a stage holds one more micro-batch for each stage after it.

``tests/verification/test_trace.py`` checks that the extrapolation is exact.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers, stages_per_rank


class ContinuedRun(NamedTuple):
    """The numbers of a run that determine the trace of one pipeline rank."""

    layers: int
    """Number of layers in each of the rank's stages."""
    micro_batches: int
    pp: int
    pp_rank: int
    before: int
    """Number of the model's layers that come before the rank's first stage."""


def point_of(run: RunConfig, pp_rank: int) -> ContinuedRun:
    """Return the size of the full run for one pipeline rank. If the rank's stages differ in size, ``layers`` is the
    size of the largest stage."""
    stages = layers_of_rank(run, pp_rank)
    layers = max(len(layers) for layers in stages)
    return ContinuedRun(layers, run.gradient_accumulation_steps, run.parallel.pp, pp_rank, stages[0].start)


def layers_of_rank(run: RunConfig, pp_rank: int) -> list[range]:
    """Return the layers of each stage of one pipeline rank."""
    stages = enumerate(stage_layers(run.model, run.parallel))
    return [layers for stage, layers in stages if rank_of_stage(stage, run.parallel) == pp_rank]


def small_points(run: RunConfig, pp_rank: int, timed: bool = False) -> list[ContinuedRun]:
    """Return the sizes of the small runs to trace, so that the trace of one pipeline rank of the full run can be
    extrapolated from them.

    There are one, two, or four sizes. If the run is small, the only size is the size of the run itself.

    Every layer is traced in two cases, because the traced values are then not linear in the number of layers:

    - With Muon and several ranks per stage, each matrix is updated by only one rank.
    - With ``timed`` and replicated weights, the step waits for the sums of gradients over the replicas only at its end.

    Args:
        timed: Whether the trace also has seconds.
    """
    target, grid = point_of(run, pp_rank), run.parallel
    pipelines = [target]
    if grid.pp > 1 and grid.schedule == "1F1B":
        pipelines = _short_pipelines(run, target)
    elif grid.pp > 1:
        # Trace a short run with just enough micro-batches to fill the pipeline, and a run with ``pp`` more
        # micro-batches. Schedules other than 1F1B accept only certain numbers of micro-batches, and they accept these
        # two.
        filled, more = 2 * grid.pp * stages_per_rank(grid), grid.pp
        if target.micro_batches > filled + more and (target.micro_batches - filled) % more == 0:
            pipelines = [target._replace(micro_batches=m) for m in (filled, filled + more)]
    elif target.micro_batches > 4:
        # The third micro-batch is the first one that adds to the gradients of several earlier micro-batches. So
        # extrapolate from runs with three and with four micro-batches.
        pipelines = [target._replace(micro_batches=m) for m in (3, 4)]
    # Only a few layers differ from their neighbors: the first and last ones, and the layers whose weights are gathered
    # ahead. With a single micro-batch, trace one more layer: gradients need more memory than activations only if there
    # are several layers, as in the full run. If the model begins with dense layers, trace these in addition.
    few = (3 if target.micro_batches > 1 else 4) + run.overlap.weight_prefetch
    few += max(run.model.first_k_dense_replace - target.before, 0)
    # Layers form a repeating pattern, because only every n-th block recomputes, and attention types alternate. So the
    # two traced sizes differ by a whole period, and the last block keeps its position in the period.
    recomputed = 1 if run.activation_checkpoint.mode == "none" else run.activation_checkpoint.every
    period = math.lcm(recomputed, _type_period(run))
    few += (target.layers - few) % period
    counts = [target.layers]
    backlog = timed and grid.z == 1 and grid.zero == 0 and grid.dp * grid.cp > 1
    deals = run.optimizer.name == "muon" and grid.world_size > grid.pp
    if (
        not (backlog or deals)
        and target.layers > few + period
        and all(len(layers) == target.layers for layers in layers_of_rank(run, pp_rank))
    ):
        counts = [few, few + period]
    return [point._replace(layers=layers) for point, layers in itertools.product(pipelines, counts)]


def _type_period(run: RunConfig) -> int:
    """Return the number of layers after which the attention types repeat."""
    return len(run.model.layer_types) or 1


def _short_pipelines(run: RunConfig, target: ContinuedRun) -> list[ContinuedRun]:
    """Return the sizes of small 1F1B pipelines to trace instead of the full pipeline.

    If more than three stages follow the rank and the micro-batches fill the pipeline, return two shorter pipelines:
    one with two stages after the rank, and one with three. Otherwise keep the number of stages, and reduce only the
    number of micro-batches, if it is large.

    Two ranks in the middle of the pipeline get the same short pipelines if their stages begin at the same position in
    the repeating pattern of layers. Then both ranks share one trace.
    """
    behind = target.pp - 1 - target.pp_rank
    if behind <= 3 or target.micro_batches < behind + 3:
        filled = [behind + 3, behind + 4]
        return [target._replace(micro_batches=m) for m in filled] if target.micro_batches > filled[-1] else [target]
    place = min(target.pp_rank, 1)
    alike = max(run.model.first_k_dense_replace, place)  # From this layer on, the pattern of layers repeats.
    before = min(target.before, alike + (target.before - alike) % _type_period(run))
    return [ContinuedRun(target.layers, few + 3, pp=place + 1 + few, pp_rank=place, before=before) for few in (2, 3)]


def run_at(run: RunConfig, point: ContinuedRun) -> RunConfig:
    """Return a copy of the run with the numbers of layers, micro-batches, and stages in ``point``."""
    training, grid, model = run.training, run.parallel, run.model
    if point != point_of(run, point.pp_rank)._replace(micro_batches=point.micro_batches):
        split = _split(run, point)
        grid = grid.model_copy(update={"pp": point.pp, "layers_per_stage": split if point.pp > 1 else None})
        model = model.model_copy(update={"num_hidden_layers": sum(split)})
    batch = point.micro_batches * training.micro_batch_size * grid.batch_ranks
    training = training.model_copy(update={"global_batch_size": batch, "compile": False})
    return run.model_copy(update={"parallel": grid, "model": model, "training": training})


def _split(run: RunConfig, point: ContinuedRun) -> tuple[int, ...]:
    """Return the number of layers of each stage in the small run at ``point``.

    The stages of ``point.pp_rank`` begin with the same types of layers as in the full run. All other layers go to the
    stages of other ranks, which the trace never builds.
    """
    grid = run.parallel.model_copy(update={"pp": point.pp})
    stages = point.pp * stages_per_rank(grid)
    own = [stage for stage in range(stages) if rank_of_stage(stage, grid) == point.pp_rank]
    starts = [layers.start for layers in layers_of_rank(run, point.pp_rank)] if len(own) > 1 else [point.before]
    split = [point.layers if stage in own else 1 for stage in range(stages)]
    next_stage, next_layer = 0, 0
    for stage, start in zip([*own, stages], [*starts, run.model.num_hidden_layers], strict=True):
        if stage > next_stage:
            split[next_stage] = start - next_layer - (stage - next_stage - 1)
        next_stage, next_layer = stage + 1, start + point.layers
    return tuple(split)


def continue_sent(values: Mapping[ContinuedRun, int], target: ContinuedRun) -> int:
    """Extrapolate a number of bytes or of collectives from the small runs in ``values`` to the size ``target``."""
    at = {(point.layers, point.micro_batches): value for point, value in values.items()}
    return _bilinear(at, (target.layers, target.micro_batches))


def continue_memory(values: Mapping[ContinuedRun, int], target: ContinuedRun) -> int:
    """Extrapolate a number of bytes in memory from the small runs in ``values`` to the size ``target``."""
    if len({point.pp for point in values} | {target.pp}) == 1:
        return continue_sent(values, target)
    at = {(point.layers, point.pp - point.pp_rank): value for point, value in values.items()}
    return _bilinear(at, (target.layers, target.pp - target.pp_rank))


def _bilinear(values: Mapping[tuple[int, int], int], wanted: tuple[int, int]) -> int:
    """Extrapolate to the value at ``wanted``, linearly in both coordinates. For each coordinate, the keys of ``values``
    have one or two different numbers. With one number, the result does not depend on the coordinate."""
    firsts, seconds = (sorted(set(places)) for places in zip(*values, strict=True))
    along_first = [_line(firsts, [values[a, b] for a in firsts], wanted[0]) for b in seconds]
    return _line(seconds, along_first, wanted[1])


def _line(at: list[int], values: list[int], wanted: int) -> int:
    if len(at) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (wanted - at[0]) // (at[1] - at[0])
