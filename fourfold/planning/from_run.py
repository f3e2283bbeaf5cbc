"""A run file as a workload."""

from __future__ import annotations

import numpy as np

from fourfold.config.layout import CHUNK_LOGITS
from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.config.stages import stages_per_rank
from fourfold.planning.workload import RECOMPUTE, Workload


def workload_of_model(model: ModelConfig) -> Workload:
    """A workload of the model's sizes on one device, with a batch of one token still to be replaced."""
    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    ups = model.intermediate_size * (2 if model.mlp == "swiglu" else 1)
    return Workload(
        layers=model.num_hidden_layers, hidden=model.hidden_size, queries=queries, keys=keys, head_dim=model.head_dim,
        inner=model.intermediate_size, ups=ups, vocab=model.padded_vocab_size, tied=model.tie_word_embeddings,
        seq=1, batch=1, micro_batch=1, bits=16, reduce_bytes=4, x=1, y=1, z=1, dp=1, cp=1, pp=1, interleave=1, zero=0,
        recompute=0, rope=np.bool_(model.position_embedding == "rope"), biases=np.bool_(model.attention_bias),
        head_norms=np.bool_(model.qk_norm),
        positions=model.max_position_embeddings if model.position_embedding == "learned" else 0,
    )  # fmt: skip


def workload_of(run: RunConfig) -> Workload:
    """The step that a run file describes."""
    training, grid = run.training, run.parallel
    values = vars(workload_of_model(run.model)) | {
        "seq": training.seq_length,
        "batch": training.global_batch_size,
        "micro_batch": training.micro_batch_size,
        "bits": 32 if training.precision == "fp32" else 16,
        "reduce_bytes": 4 if training.reduce_dtype == "fp32" else 2,
        **{axis: getattr(grid, axis) for axis in ("x", "y", "z", "dp", "cp", "pp", "zero")},
        "interleave": stages_per_rank(grid),
        "recompute": RECOMPUTE.index(run.activation_checkpoint.mode),
        "overlap_x": np.bool_(run.overlap.input_gradients),
        "overlap_z": np.bool_(run.overlap.weight_prefetch > 0),
        "overlap_dp": np.bool_(True),
        "fused": np.bool_(training.compile),
        "prefetch": run.overlap.weight_prefetch,
        "chunk_logits": CHUNK_LOGITS["cpu" if training.device == "cpu" else "cuda"],
        "attention_again": np.bool_("attention" in run.activation_checkpoint.modules),
        "mlp_again": np.bool_("mlp" in run.activation_checkpoint.modules),
    }
    return Workload(**values)
