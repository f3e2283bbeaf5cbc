"""Compute the bytes of Muon's two all-to-alls: matrices to their owners, and updates back, with closed formulas.

A stage's matrices are assigned to its N ranks in units. Suppose that n matrices have the same shape, with e entries
each, and that the largest matrix has E entries. A unit may have at most E entries, so these matrices need at least t =
ceil(n/(N·floor(E/e))) rounds. Each unit then has ceil(n/(N·t)) of the n matrices. In each round, every rank takes one
unit, and larger units come first.

Rank 0 sends its part of a matrix if no other rank with that part is nearer to the owner. An owner returns its matrices
once to every copy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers


class Kind(NamedTuple):
    """A matrix, and how ranks split it. ``part`` is the number of entries that rank 0 stores, if it stores some."""

    rows: int
    columns: int
    part: int
    pieces: int
    """Number of ranks with the same (x, y) over which the matrix is sharded. Experts are sharded as a stack of
    matrices."""
    ep: int = 1
    first: bool = True
    """Whether rank 0 stores a part of the matrix."""
    over_x: int = 1
    """Number of ranks of x that store a copy."""


def exchanged(run: RunConfig, layers: list[int]) -> tuple[int, int, int]:
    """Return, for the first rank of a stage with these layers: the number of rounds, the bytes of matrices that it
    sends, and the bytes of updates that it sends."""
    grid = run.parallel
    ranks, plane = grid.dp * grid.cp * grid.z * grid.y * grid.x, grid.x * grid.y
    by_shape: dict[tuple[int, int], list[Kind]] = {}
    for layer in layers:
        for kind in _kinds(run, layer):
            by_shape.setdefault((kind.rows, kind.columns), []).append(kind)
    largest = max(rows * columns for rows, columns in by_shape)
    units: list[list[Kind]] = []
    for (rows, columns), kinds in by_shape.items():
        turns = math.ceil(len(kinds) / (ranks * (largest // (rows * columns))))
        together = math.ceil(len(kinds) / (ranks * turns))
        units += [kinds[first : first + together] for first in range(0, len(kinds), together)]
    units.sort(key=lambda unit: -len(unit) * unit[0].rows * unit[0].columns)
    sent = returned = 0
    for place, unit in enumerate(units):
        owner = place % ranks
        for kind in unit:
            is_nearest = kind.over_x == 1 or owner % grid.x == 0
            sent += kind.part * (kind.first and is_nearest and _nearest(run, owner // plane, kind) == 0)
            copies = ranks // plane // (kind.pieces * kind.ep)
            returned += kind.rows * kind.columns * kind.over_x * copies * (owner == 0)
    item = 4 if run.training.precision == "fp32" else 2
    return math.ceil(len(units) / ranks), item * sent, item * returned


def _nearest(run: RunConfig, owner: int, kind: Kind) -> int:
    """Return the rank that is nearest to the owner, among the ranks of (dp, cp, z) that store the same part as rank 0.
    The nearest rank shares the most outer axes with the owner."""
    grid = run.parallel

    def place(rank: int) -> tuple[int, ...]:
        return rank // grid.z // grid.cp, rank // grid.z % grid.cp, rank % grid.z

    holders = range(0, grid.dp * grid.cp * grid.z, kind.pieces * kind.ep)
    return min(holders, key=lambda rank: [a != b for a, b in zip(place(rank), place(owner), strict=True)])


def _kinds(run: RunConfig, layer: int) -> list[Kind]:
    """Return the matrices of a layer, in the order of the model."""
    model, grid = run.model, run.parallel
    x, y, hidden = grid.x, grid.y, model.hidden_size
    tokens = grid.dp * grid.cp * grid.z
    pieces = grid.z if grid.zero == 0 else tokens

    def up(out: int, read: int = hidden, ranks: int = x) -> Kind:
        return Kind(out, read, math.ceil(out // ranks / pieces) * (read // y), pieces, over_x=x // ranks)

    def down(width: int) -> Kind:
        return Kind(hidden, width, math.ceil(hidden // y / pieces) * (width // x), pieces)

    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    kinds = [up(queries), up(keys), up(keys), down(queries)]
    if model.kv_lora_rank:
        heads, of_queries = model.num_attention_heads, model.q_lora_rank or hidden
        nope, rope, values = (heads * n for n in (model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim))
        ranks = [rank for rank in (model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim) if rank]
        kinds = [up(rank, ranks=1) for rank in ranks]
        kinds += [up(nope, of_queries), up(rope, of_queries)]
        kinds += [up(nope, model.kv_lora_rank), up(values, model.kv_lora_rank), down(values)]
    inner = model.intermediate_size
    if model.is_sparse(layer):
        inner, width = model.shared_expert_intermediate_size, model.moe_intermediate_size
        shards = max(grid.z // grid.ep, 1) if grid.zero == 0 else tokens // grid.ep
        own = model.num_experts // grid.ep
        for rows, columns, cut in (*((width, hidden, width // x),) * 2, (hidden, width, hidden // y)):
            part, mine = rows * columns // (x * y), math.ceil(own / shards)
            if math.ceil(cut / shards) * own < mine * cut:  # FSDP2 splits each expert.
                part, mine = math.ceil(cut / shards) * (part // cut), own
            kinds += [Kind(rows, columns, part, shards, grid.ep, e < mine) for e in range(model.num_experts)]
    if inner:
        kinds += [up(inner)] * (2 if model.gated_mlp else 1) + [down(inner)]
    return kinds


def stepped_by_muon(run: RunConfig, layers: list[int]) -> int:
    """Return how many entries of Muon's matrices the first rank of a stage with these layers stores."""
    return sum(kind.part * kind.first for layer in layers for kind in _kinds(run, layer))


def layers_of(run: RunConfig, pp_rank: int) -> list[int]:
    """Return the layers of all stages of a rank of pp."""
    stages = enumerate(stage_layers(run.model, run.parallel))
    return [layer for stage, own in stages if rank_of_stage(stage, run.parallel) == pp_rank for layer in own]
