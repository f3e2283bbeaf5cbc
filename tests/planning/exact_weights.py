"""Compute the bytes of the weights that a step gathers over dp, cp, and z, and of the gradients that it sums, with
closed formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from exact_lines import Line, axis_name
from exact_order import directions
from exact_parameters import Stage, Tiles, expert_shards, tiles_of, weight_shards

from fourfold.config.run import RunConfig
from fourfold.config.stages import splits_backward, stages_per_rank


def weight_lines(run: RunConfig, stage: Stage) -> Iterator[Line]:
    """Yield the gathers of weights and the sums of gradients over z, dp, and cp (``parallel.data.replicated`` and
    ``parallel.data.fully_sharded``)."""
    grid, training, tiles = run.parallel, run.training, tiles_of(run, stage)
    reduced = 4 if training.reduce_dtype == "fp32" else 2
    replicas = axis_name(run, ("dp", "cp"))
    if grid.z == 1 and (grid.zero == 0 or grid.dp * grid.cp == 1):
        buckets = stage.layers + stage.is_first + stage.is_last
        if grid.dp * grid.cp > 1:
            size = sum(part.rows * part.width for part in tiles.parts())
            yield Line(replicas, "all_reduce", "gradients", buckets, reduced * size)
        if tiles.experts and grid.dp * grid.cp > grid.ep:
            size = sum(part.rows * part.width for part in tiles.experts * tiles.sparse_layers)
            yield Line("ep_replicas", "all_reduce", "gradients", tiles.sparse_layers, reduced * size)
        return
    item, steps, shards = 4 if training.precision == "fp32" else 2, run.gradient_accumulation_steps, weight_shards(run)
    axis = axis_name(run, ("z",) if grid.zero == 0 else ("dp", "cp", "z"))
    gathers = _gathers(run, stage)
    groups = [(tiles.dense_block, tiles.dense_layers, gathers.block), (tiles.block, tiles.layers, gathers.block)]
    groups += [(tiles.linear_block, tiles.linear_layers, gathers.block), (tiles.last, 1, gathers.last)]
    groups += [(tiles.embedding, 1, gathers.embedding), (tiles.positions, 1, gathers.embedding)]
    levels, levels_of_z = _levels(run, axis, shards), _levels(run, "z", grid.z)
    for parts, count, (from_all, from_z) in groups:
        if not parts or count == 0:
            continue
        padded = sum(part.chunk(shards) for part in parts) * shards
        sums = count * (1 if grid.zero == 1 else steps)
        for name, share in levels:
            yield Line(name, "all_gather", "weights", count * from_all, count * from_all * item * padded // share)
            yield Line(name, "reduce_scatter", "gradients", sums, sums * reduced * padded // share)
        for name, share in levels_of_z:
            yield Line(name, "all_gather", "weights", count * from_z, count * from_z * item * padded // share)
        if grid.zero == 0 and grid.dp * grid.cp > 1:
            yield Line(replicas, "all_reduce", "gradients", count, count * reduced * padded // shards)
    if tiles.experts:
        yield from _expert_weight_lines(run, tiles, gathers, item, reduced)


def _expert_weight_lines(run: RunConfig, tiles: Tiles, gathers: _Gathers, item: int, reduced: int) -> Iterator[Line]:
    """Yield the gathers and sums of the experts' weights, if ep divides the experts. Each group consists of ranks that
    have the same experts."""
    grid, shards, steps = run.parallel, expert_shards(run), run.gradient_accumulation_steps
    of_z, (from_all, from_z) = max(grid.z // grid.ep, 1), gathers.block
    padded = sum(part.chunk(shards) for part in tiles.experts) * shards
    count, sums = tiles.sparse_layers, tiles.sparse_layers * (1 if grid.zero == 1 else steps)
    if shards > 1:
        yield Line("ep_shards", "all_gather", "weights", count * from_all, count * from_all * item * padded)
        yield Line("ep_shards", "reduce_scatter", "gradients", sums, sums * reduced * padded)
    if of_z > 1 and from_z:
        yield Line("ep_shards of z", "all_gather", "weights", count * from_z, count * from_z * item * padded)
    if grid.zero == 0 and grid.dp * grid.cp * grid.z > grid.ep * shards:
        yield Line("ep_copies", "all_reduce", "gradients", count, count * reduced * padded // shards)


def _levels(run: RunConfig, axis: str, ranks: int) -> list[tuple[str, int]]:
    """Return the groups of ranks that run an axis's collectives, each with a divisor for the size of its full tensors.
    Across nodes, each rank of a node handles only its own part of the tensor (``parallel.data.fsdp_in_levels``)."""
    per_node = run.overlap.shards_per_node
    if not 1 < per_node < ranks:
        return [(axis, 1)]
    return [(f"{axis} inside nodes", 1), (f"{axis} across nodes", per_node)]


class _Gathers(NamedTuple):
    """How often FSDP2 gathers a unit's weights in a step. The first number of each pair counts the gathers from all
    shards. The second number counts the gathers from shards over z, which FSDP2 has kept after a forward pass."""

    block: tuple[int, int]
    last: tuple[int, int]
    embedding: tuple[int, int]


def _gathers(run: RunConfig, stage: Stage) -> _Gathers:
    grid, steps = run.parallel, run.gradient_accumulation_steps
    order = [False, True] * steps
    if grid.pp > 1 and not splits_backward(grid):
        order = directions(grid.schedule, stage.number, grid.pp, steps, stages_per_rank(grid))
    if grid.zero in (1, 2) and grid.z == 1:  # weights are gathered once per step
        return _Gathers((1, 0), (1, 0), (1, 0))
    # The head's weights stay gathered from its forward pass to its backward pass.
    last = (steps, 0)
    if not (0 < grid.zero < 3 and grid.dp * grid.cp > 1):
        return _Gathers((2 * steps, 0), last, (steps, 0))
    # With ``zero`` 1 or 2, each rank keeps a unit's weights sharded over z after a forward pass, and the next gather
    # runs over z. After a backward pass, the next gather is from the shards of all ranks.
    blocks, tables = [0, 0], [0, 0]
    for i, backward in enumerate(order):
        from_z = i > 0 and not order[i - 1]
        blocks[from_z] += 1
        tables[from_z] += not backward
    return _Gathers((blocks[0], blocks[1]), last, (tables[0], tables[1]))
