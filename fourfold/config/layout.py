"""Which sizes fit which grid: every refusal names the layer, the number, and the nearest that work."""

from __future__ import annotations

import math
from typing import Literal

from fourfold.config.model import ModelConfig, round_to_multiple
from fourfold.config.run import ParallelConfig, RunConfig, TrainingConfig
from fourfold.errors import UserError

AttentionSplit = Literal["heads", "batch", "sequence"]


def check_layout(run: RunConfig) -> None:
    """Raise ``UserError`` when the model, the batch or the sequence cannot be divided over the grid."""
    model, grid, training = run.model, run.parallel, run.training
    for axis, size in (("cp", grid.cp), ("pp", grid.pp)):
        if size > 1:
            raise UserError(f"parallel.{axis} = {size} is not supported yet; split over x, y, z or dp instead")
    keys = model.num_key_value_heads * model.head_dim
    heads, multiple = model.num_attention_heads, model.pad_vocab_size_to_multiple_of
    q_proj, k_proj = "layers.*.self_attn.qkv.q_proj", "layers.*.self_attn.qkv.k_proj"
    _divides("model.num_attention_heads", heads, "x", grid.x, q_proj, unit=model.num_key_value_heads)
    _divides("key and value features", keys, "x", grid.x, k_proj, unit=model.head_dim)
    _divides("model.hidden_size", model.hidden_size, "y", grid.y, "the residual stream", unit=heads)
    _divides("model.intermediate_size", model.intermediate_size, "x", grid.x, "layers.*.mlp.up")
    _divides("the padded vocabulary", model.padded_vocab_size, "x", grid.x, "embed_tokens and lm_head", unit=multiple)
    if model.position_embedding == "learned":
        _divides("model.max_position_embeddings", model.max_position_embeddings, "x", grid.x, "embed_positions")
    _divides("training.seq_length", training.seq_length, "x", grid.x, "the residual stream")
    tokens = training.micro_batch_size * training.seq_length
    _divides("tokens of a micro-batch", tokens, "y", grid.y, "lm_head")
    split = attention_split(model, grid, training)
    if split == "heads":
        _divides("key and value features", keys, "x·y", grid.x * grid.y, k_proj, unit=model.head_dim)
    if model.position_embedding == "learned" and training.seq_length > model.max_position_embeddings:
        raise UserError(
            f"training.seq_length = {training.seq_length} is longer than the position table: "
            f"model.max_position_embeddings = {model.max_position_embeddings} is the most"
        )
    _check_batch(training, grid)


def attention_split(model: ModelConfig, grid: ParallelConfig, training: TrainingConfig) -> AttentionSplit:
    """How the y ranks share the attention: along the heads where they divide, else the batch, else the queries."""
    if model.num_attention_heads % (grid.x * grid.y) == 0:
        return "heads"
    if training.micro_batch_size % grid.y == 0:
        return "batch"
    if training.seq_length % grid.y == 0:
        return "sequence"
    raise UserError(
        f"attention cannot be shared over y = {grid.y}: none of model.num_attention_heads = "
        f"{model.num_attention_heads} (over x·y = {grid.x * grid.y}), training.micro_batch_size = "
        f"{training.micro_batch_size} and training.seq_length = {training.seq_length} divides; "
        f"a seq_length of {round_to_multiple(training.seq_length, grid.x * grid.y)} would"
    )


def _divides(what: str, number: int, axis: str, size: int, layer: str, unit: int = 1) -> None:
    """unit: what the number must be a multiple of besides."""
    if number % size == 0:
        return
    below = next(s for s in range(min(size, number), 0, -1) if number % s == 0)
    above = next((s for s in range(size, min(number, 10 * size) + 1) if number % s == 0), below)
    sizes = " or ".join(str(s) for s in sorted({below, above}))
    works = round_to_multiple(number, math.lcm(size, unit))
    raise UserError(
        f"{layer}: {what} = {number} cannot be split over {axis} = {size}; {axis} = {sizes} works, "
        f"and so does {what} = {works}"
    )


def _check_batch(training: TrainingConfig, grid: ParallelConfig) -> None:
    at_once = training.micro_batch_size * grid.batch_ranks
    if training.global_batch_size % at_once:
        raise UserError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of micro_batch_size × dp × z "
            f"= {training.micro_batch_size} × {grid.dp} × {grid.z} = {at_once}; "
            f"{round_to_multiple(training.global_batch_size, at_once)} works"
        )
