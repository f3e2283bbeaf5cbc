"""Which sizes fit which grid: every refusal names the layer, the number, and the nearest that work."""

from __future__ import annotations

import math
from typing import Literal

from fourfold.config.model import ModelConfig, round_to_multiple
from fourfold.config.run import ParallelConfig, RunConfig, TrainingConfig
from fourfold.config.stages import SPLIT_BACKWARD, balanced, stages_per_rank
from fourfold.errors import UserError

AttentionSplit = Literal["heads", "batch", "sequence"]
ContextMethod = Literal["ring", "ulysses"]

FLOAT8_MULTIPLE = 16
"""What every size of a float8 matrix product is a multiple of (torch._scaled_mm)."""

CHUNK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Logits that one rank makes at once: what fits a CPU's cache; enough rows for a GPU's matrix units."""


def check_layout(run: RunConfig) -> None:
    """Raise ``UserError`` when the model, the batch or the sequence cannot be divided over the grid."""
    model, grid, training = run.model, run.parallel, run.training
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
    if grid.cp > 1:
        _divides("training.seq_length", training.seq_length, "2·cp", 2 * grid.cp, "two chunks of tokens for each rank")
    share = " / cp" if grid.cp > 1 else ""
    _divides(f"training.seq_length{share}", training.seq_length // grid.cp, "x", grid.x, "the residual stream")
    tokens = training.micro_batch_size * training.seq_length // grid.cp
    _divides(f"tokens of a micro-batch{share}", tokens, "y", grid.y, "lm_head")
    split = attention_split(model, grid, training)
    context_method(model, grid, training, masks_documents=run.data.mask_documents)
    if split == "heads":
        _divides("key and value features", keys, "x·y", grid.x * grid.y, k_proj, unit=model.head_dim)
    if model.position_embedding == "learned" and training.seq_length > model.max_position_embeddings:
        raise UserError(
            f"training.seq_length = {training.seq_length} is longer than the position table: "
            f"model.max_position_embeddings = {model.max_position_embeddings} is the most"
        )
    if training.float8 != "none":
        _check_float8(model, grid, training)
    _check_batch(training, grid)
    if grid.pp > 1:
        _check_pipeline(model, grid, run.gradient_accumulation_steps)


def attention_split(model: ModelConfig, grid: ParallelConfig, training: TrainingConfig) -> AttentionSplit:
    """How the y ranks share the attention: along the heads where they divide, else the batch, else the queries."""
    if model.num_attention_heads % (grid.x * grid.y) == 0:
        return "heads"
    if training.micro_batch_size % grid.y == 0:
        return "batch"
    if grid.cp > 1:
        raise UserError(
            f"attention cannot be shared over y = {grid.y} besides cp = {grid.cp}: neither model.num_attention_heads = "
            f"{model.num_attention_heads} (over x·y = {grid.x * grid.y}) nor training.micro_batch_size = "
            f"{training.micro_batch_size} divides; a micro_batch_size of "
            f"{round_to_multiple(training.micro_batch_size, grid.y)} would"
        )
    if training.seq_length % grid.y == 0:
        return "sequence"
    raise UserError(
        f"attention cannot be shared over y = {grid.y}: none of model.num_attention_heads = "
        f"{model.num_attention_heads} (over x·y = {grid.x * grid.y}), training.micro_batch_size = "
        f"{training.micro_batch_size} and training.seq_length = {training.seq_length} divides; "
        f"a seq_length of {round_to_multiple(training.seq_length, grid.x * grid.y)} would"
    )


def context_method(
    model: ModelConfig, grid: ParallelConfig, training: TrainingConfig, masks_documents: bool
) -> ContextMethod:
    """How the ranks of cp attend: by exchange of heads for tokens, where every rank of the exchange gets whole heads
    with their keys and values, else around the ring."""
    ranks = grid.x * (grid.y if attention_split(model, grid, training) == "heads" else 1) * grid.cp
    divides = model.num_attention_heads % ranks == 0 and model.num_key_value_heads % ranks == 0
    if grid.cp_method == "ulysses" and not divides:
        raise UserError(
            f"parallel.cp_method = 'ulysses': model.num_attention_heads = {model.num_attention_heads} and "
            f"num_key_value_heads = {model.num_key_value_heads} must divide over the {ranks} ranks of cp, x and y that "
            "share the heads; cp_method = 'ring' works"
        )
    if grid.cp_method == "auto":
        return "ulysses" if divides and not masks_documents else "ring"
    return grid.cp_method


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


def _check_float8(model: ModelConfig, grid: ParallelConfig, training: TrainingConfig) -> None:
    sizes = {
        "model.hidden_size / y": model.hidden_size // grid.y,
        "query features / x": model.num_attention_heads * model.head_dim // grid.x,
        "key and value features / x": model.num_key_value_heads * model.head_dim // grid.x,
        "model.intermediate_size / x": model.intermediate_size // grid.x,
        "tokens of a micro-batch / cp": training.micro_batch_size * training.seq_length // grid.cp,
    }
    for what, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            raise UserError(
                f"training.float8 = '{training.float8}': {what} = {size} must be a multiple of {FLOAT8_MULTIPLE} on "
                f"every rank; {round_to_multiple(size, FLOAT8_MULTIPLE)} works, and so does float8 = 'none'"
            )


def _check_batch(training: TrainingConfig, grid: ParallelConfig) -> None:
    at_once = training.micro_batch_size * grid.batch_ranks
    if training.global_batch_size % at_once:
        raise UserError(
            f"training.global_batch_size = {training.global_batch_size} is not a multiple of micro_batch_size × dp × z "
            f"= {training.micro_batch_size} × {grid.dp} × {grid.z} = {at_once}; "
            f"{round_to_multiple(training.global_batch_size, at_once)} works"
        )


def _check_pipeline(model: ModelConfig, grid: ParallelConfig, micro_batches: int) -> None:
    stages, layers, schedule = grid.pp * stages_per_rank(grid), model.num_hidden_layers, grid.schedule
    if stages > layers:
        raise UserError(
            f"parallel.pp = {grid.pp} with schedule '{schedule}' makes {stages} stages, and the model has {layers} "
            f"layers; pp = {max(1, layers * grid.pp // stages)} works, and so does num_hidden_layers = {stages}"
        )
    counts = grid.layers_per_stage
    if counts is not None and (len(counts) != stages or sum(counts) != layers or min(counts) < 1):
        even = list(balanced(layers, stages, 0.0, 0.0))
        raise UserError(
            f"parallel.layers_per_stage = {list(counts)} must be {stages} positive numbers that sum to {layers}; "
            f"{even} works"
        )
    if schedule in SPLIT_BACKWARD and (grid.z > 1 or grid.zero > 1):
        raise UserError(
            f"parallel.schedule = '{schedule}' computes weight gradients apart, from weights that stay whole until the "
            f"step ends: it allows z = 1 with zero 0 or 1, and this grid has z = {grid.z} and zero = {grid.zero}; "
            "schedule = '1F1B' or 'Interleaved1F1B' works"
        )
    rounds = max(1, micro_batches // grid.pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and micro_batches % rounds:
        raise UserError(
            f"parallel.schedule = '{schedule}' runs micro-batches in rounds of pp = {grid.pp}, and a step has "
            f"{micro_batches}; {round_to_multiple(micro_batches, grid.pp)} micro-batches work (change "
            "training.global_batch_size or micro_batch_size), and so does schedule = '1F1B'"
        )
    if schedule == "DualPipeV" and micro_batches < 2 * grid.pp:
        raise UserError(
            f"parallel.schedule = 'DualPipeV' needs at least 2·pp = {2 * grid.pp} micro-batches in a step, and there "
            f"are {micro_batches}; schedule = 'ZBVZeroBubble' or '1F1B' works"
        )
