"""Compute the values of the letters in the formulas of docs/parallelism.md, for a run."""

from __future__ import annotations

from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig


def letters_of(run: RunConfig) -> dict[str, float]:
    model, grid, training = run.model, run.parallel, run.training
    inner, rms = model.intermediate_size, model.norm == "rmsnorm"
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    ups = 2 * inner if model.gated_mlp else inner
    return {
        "B": training.micro_batch_size,
        "S": training.seq_length // grid.cp,
        "H": model.hidden_size,
        "F": inner,
        "U": ups,
        "N": model.num_attention_heads,
        "Q": queries,
        "K": keys,
        "V": model.padded_vocab_size,
        "e": 4 if training.precision == "fp32" else 2,
        "g": 4 if training.reduce_dtype == "fp32" else 2,
        "f": 4 if rms else 16,
        "b": 4 if rms else 8,
        "A": run.gradient_accumulation_steps,
        "P": num_parameters(model),
        "W": model.hidden_size * (2 * queries + 2 * keys + ups + inner) / (grid.x * grid.y),
        "x": grid.x,
        "y": grid.y,
        "z": grid.z,
        "dp": grid.dp,
        "cp": grid.cp,
    }
