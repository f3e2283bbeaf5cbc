"""What one rank of fourfold's own grid stores and sends in a step, in closed form.

The formulas of docs/parallelism.md with every rounding: they equal ``fourfold trace`` byte for byte
(tests/planning/test_exact.py), for any number of layers, micro-batches and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fourfold.config.layout import attention_split
from fourfold.config.run import RunConfig

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits that the head makes at once (parallel.head; that module needs torch, so the numbers stand here too)."""


class Part(NamedTuple):
    """A parameter's tile on one rank of (x, y): rows, entries of a row, and over which axes its gradient is a share."""

    rows: int
    width: int
    partial_over: tuple[str, ...] = ()

    def chunk(self, shards: int) -> int:
        """Entries of the first of ``shards``: FSDP2 cuts rows as torch.chunk does."""
        return math.ceil(self.rows / shards) * self.width


@dataclass(frozen=True)
class Tiles:
    """The parameters of one rank of (x, y), in the groups that FSDP2 gathers together."""

    block: tuple[Part, ...]
    last: tuple[Part, ...]
    embedding: tuple[Part, ...]
    positions: tuple[Part, ...]


@dataclass(frozen=True)
class Line:
    """All collectives of one kind in a step, as ``fourfold trace`` counts them."""

    axis: str
    op: str
    purpose: str
    count: int
    bytes: int


def tiles_of(run: RunConfig) -> Tiles:
    """The parameters of a run's model as one rank of (x, y) holds them."""
    model, grid = run.model, run.parallel
    x, y = grid.x, grid.y
    hidden, inner = model.hidden_size // y, model.intermediate_size // x
    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    norm = [Part(hidden, 1, ("x",))] * (2 if model.norm == "layernorm" else 1)
    split = attention_split(model, grid, run.training)
    bias_over = () if split == "heads" else ("y",)
    bias_ranks = x * y if split == "heads" else x
    block = [*norm, *norm]
    for out in (queries, keys, keys):
        block.append(Part(out // x, hidden))
        if model.attention_bias:
            block.append(Part(out // bias_ranks, 1, bias_over))
    if model.qk_norm:
        block += [Part(model.head_dim, 1, ("y", "x"))] * 2
    block.append(Part(hidden, queries // x))
    if model.attention_output_bias:
        block.append(Part(hidden, 1, ("x",)))
    for _ in range(2 if model.mlp == "swiglu" else 1):
        block.append(Part(inner, hidden))
        if model.mlp_bias:
            block.append(Part(inner, 1))
    block.append(Part(hidden, inner))
    if model.mlp_bias:
        block.append(Part(hidden, 1, ("x",)))
    table = Part(model.padded_vocab_size // x, hidden)
    learned = model.position_embedding == "learned"
    return Tiles(
        block=tuple(block),
        last=(*norm, table),
        embedding=() if model.tie_word_embeddings else (table,),
        positions=(Part(model.max_position_embeddings // x, hidden),) if learned else (),
    )


def stored_bytes(run: RunConfig) -> tuple[int, int, int]:
    """Bytes of the parameters, the gradients at the step, and the optimizer's states on the first rank."""
    grid, tiles = run.parallel, tiles_of(run)
    item = 4 if run.training.master_weights == "fp32" else 2
    entries = sum(part.chunk(_shards(run)) for part in _all_parts(tiles, run.model.num_hidden_layers))
    assert grid.pp == 1, "of a pipeline's stages memory.py speaks"
    return item * entries, item * entries, 2 * item * entries


def collective_lines(run: RunConfig) -> list[Line]:
    """Every collective of a step with its count and the bytes of its full tensors; those of one rank are left out."""
    lines = [*_block_lines(run), *_outside_lines(run), *_sharding_lines(run), *_scalar_lines(run)]
    merged: dict[tuple[str, str, str], list[int]] = {}
    for line in lines:
        if line.count:
            entry = merged.setdefault((line.axis, line.op, line.purpose), [0, 0])
            entry[0] += line.count
            entry[1] += line.bytes
    return [Line(*key, *entry) for key, entry in merged.items()]


def _block_lines(run: RunConfig) -> list[Line]:
    model, grid, training = run.model, run.parallel, run.training
    x, y = grid.x, grid.y
    steps = model.num_hidden_layers * run.gradient_accumulation_steps
    tokens = training.micro_batch_size * training.seq_length // grid.cp
    item = 4 if training.precision == "fp32" else 2
    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    ups = model.intermediate_size * (2 if model.mlp == "swiglu" else 1)
    mode, modules = run.activation_checkpoint.mode, run.activation_checkpoint.modules
    again = 2 if mode == "full" else 1
    norms_again = 2 if mode == "full" or (mode == "selective" and "norms" in modules) else 1
    core_again = 2 if mode == "full" or (mode == "selective" and "attention" in modules) else 1
    residual = item * tokens * model.hidden_size // y
    sums, sums_back = (4, 4) if model.norm == "rmsnorm" else (16, 8)
    lines: list[Line] = []

    def add(axis: str, op: str, purpose: str, size: int, times: int = 1, count: int = 1) -> None:
        if getattr(grid, axis) > 1:
            lines.append(Line(axis, op, purpose, steps * times * count, steps * times * size))

    add("x", "all_gather", "qkv: tokens", residual, again)
    add("x", "reduce_scatter", "o_proj: outputs", residual, again)
    add("x", "all_gather", "up: tokens", residual, again)
    add("x", "reduce_scatter", "down: outputs", residual, again)
    add("x", "all_gather", "down: output gradient", residual)
    add("x", "reduce_scatter", "up: input gradient", residual)
    add("x", "all_gather", "o_proj: output gradient", residual)
    add("x", "reduce_scatter", "qkv: input gradient", residual)
    add("y", "reduce_scatter", "qkv: outputs", item * tokens * (queries + 2 * keys) // x, again)
    add("y", "all_gather", "o_proj: inputs", item * tokens * queries // x, again)
    add("y", "all_reduce", "up: outputs", item * tokens * ups // x, again)
    add("y", "all_reduce", "down: input gradient", item * tokens * model.intermediate_size // x)
    add("y", "reduce_scatter", "o_proj: input gradient", item * tokens * queries // x)
    add("y", "all_gather", "qkv: output gradient", item * tokens * (queries + 2 * keys) // x)
    add("y", "all_reduce", "norm: statistics", 2 * sums * tokens // x, norms_again, 2)
    add("y", "all_reduce", "norm: statistics' gradient", 2 * sums_back * tokens // x, 1, 2)

    split = attention_split(model, grid, training)
    ranks = x * y if split == "heads" else x
    apart = model.num_key_value_heads % ranks != 0
    mine = tokens // y if split == "batch" else tokens
    for op, times in (("all_gather", core_again), ("reduce_scatter", 1)):
        if split == "sequence" or (split == "heads" and apart):
            add("y", op, "attention: keys and values", 2 * item * tokens * keys // x, times, 2)
        if apart and model.num_key_value_heads % x:
            add("x", op, "attention: keys and values", 2 * item * mine * keys, times, 2)
    return lines


def _outside_lines(run: RunConfig) -> list[Line]:
    """Embedding, last norm, and head."""
    model, grid, training = run.model, run.parallel, run.training
    x, y, steps = grid.x, grid.y, run.gradient_accumulation_steps
    tokens = training.micro_batch_size * training.seq_length // grid.cp
    item = 4 if training.precision == "fp32" else 2
    residual, columns = item * tokens * model.hidden_size // y, model.padded_vocab_size // x
    device = "cpu" if training.device == "cpu" else "cuda"
    chunk = min(tokens, max(1, CHUNK_LOGITS[device] // columns // y) * y)
    chunks = math.ceil(tokens / chunk)
    sums, sums_back = (4, 4) if model.norm == "rmsnorm" else (16, 8)
    lines: list[Line] = []

    def add(axis: str, op: str, purpose: str, size: int, count: int = 1) -> None:
        if getattr(grid, axis) > 1:
            lines.append(Line(axis, op, purpose, steps * count, steps * size))

    for op in ("reduce_scatter", "all_gather"):
        add("x", op, "embed_tokens: rows", residual)
        if model.position_embedding == "learned":
            rows = tokens if run.data.mask_documents else training.seq_length
            add("x", op, "embed_positions: rows", item * rows * model.hidden_size // y)
    add("y", "all_reduce", "norm: statistics", sums * tokens // x)
    add("y", "all_reduce", "norm: statistics' gradient", sums_back * tokens // x)
    add("x", "all_gather", "lm_head: tokens", residual)
    add("y", "reduce_scatter", "lm_head: logits", item * tokens * columns, chunks)
    add("x", "all_gather", "lm_head: normalizers", 8 * x * tokens // y, chunks)
    add("y", "all_gather", "lm_head: logits' gradient", item * tokens * columns, chunks)
    add("x", "reduce_scatter", "lm_head: input gradient", residual)
    add("y", "all_reduce", "lm_head: loss", 4)
    return lines


def _sharding_lines(run: RunConfig) -> list[Line]:
    """Weights gathered and gradients summed over z and dp by FSDP2: ``parallel.data_parallel``."""
    model, grid, training = run.model, run.parallel, run.training
    steps, zero = run.gradient_accumulation_steps, grid.zero
    item = 4 if training.precision == "fp32" else 2
    reduced = 4 if training.reduce_dtype == "fp32" else 2
    shards, tiles, layers = _shards(run), tiles_of(run), model.num_hidden_layers
    axis = axis_name(run, ("z",) if zero == 0 else ("dp", "z"))
    groups = [(tiles.block, layers), (tiles.last, 1), (tiles.embedding, 1), (tiles.positions, 1)]
    lines: list[Line] = []
    for parts, count in groups:
        if not parts:
            continue
        padded = sum(part.chunk(shards) for part in parts) * shards
        if shards > 1:
            # With z = 1 the weights of zero 1 and 2 are whole from the first forward until the step ends.
            once = zero in (1, 2) and grid.z == 1
            gathers = count if once else steps * count
            if parts is tiles.last and tiles.embedding and steps > 1:
                gathers += 1  # FSDP2's own look-ahead meets it once more, after the first micro-batch
            keeps_z = 0 < zero < 3 and 1 < grid.z < shards
            if parts is tiles.block and (zero == 3 or grid.z > 1):
                if keeps_z:
                    kept = sum(part.chunk(shards) for part in parts) * shards
                    lines.append(Line("z", "all_gather", "weights", steps * count, steps * count * item * kept))
                else:
                    gathers *= 2
            lines.append(Line(axis, "all_gather", "weights", gathers, gathers * item * padded))
            sums = count * (1 if zero == 1 else steps)
            lines.append(Line(axis, "reduce_scatter", "gradients", sums, sums * reduced * padded))
        if zero == 0 and grid.dp > 1:
            lines.append(Line("dp", "all_reduce", "gradients", count, count * reduced * padded // shards))
    item = 4 if training.master_weights == "fp32" else 2
    shares: dict[str, int] = {}
    for part in _all_parts(tiles, layers):
        over = tuple(a for a in ("y", "x") if a in part.partial_over and getattr(grid, a) > 1)
        if over:
            shares["_".join(over)] = shares.get("_".join(over), 0) + part.chunk(shards)
    lines += [Line(a, "all_reduce", "gradients of norms and biases", 1, item * n) for a, n in shares.items()]
    return lines


def _scalar_lines(run: RunConfig) -> list[Line]:
    grid = run.parallel
    lines = []
    if grid.dp * grid.z > 1:
        batch = axis_name(run, ("dp", "z"))
        lines += [Line(batch, "all_reduce", "kept tokens", 1, 8), Line(batch, "all_reduce", "loss", 1, 4)]
    if grid.world_size > 1:
        world = axis_name(run, ("pp", "dp", "cp", "z", "y", "x"))
        lines.append(Line(world, "all_reduce", "gradient norm", 1, 8))
    return lines


def axis_name(run: RunConfig, axes: tuple[str, ...]) -> str:
    """The name of the group over ``axes``: that of the only axis longer than 1 where there is one."""
    longer = [axis for axis in axes if getattr(run.parallel, axis) > 1]
    if len(longer) <= 1:
        return (longer or [axes[-1]])[0]
    name = "_".join(longer)
    return name if name in ("dp_z", "y_x") else "world"


def _shards(run: RunConfig) -> int:
    grid = run.parallel
    return grid.z if grid.zero == 0 else grid.z * grid.dp * grid.cp


def _all_parts(tiles: Tiles, layers: int) -> list[Part]:
    return [*tiles.block * layers, *tiles.last, *tiles.embedding, *tiles.positions]
