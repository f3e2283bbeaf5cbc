"""A run file as a workload."""

from __future__ import annotations

import numpy as np

from fourfold.config.layout import CHUNK_LOGITS, context_method
from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.config.stages import stages_per_rank
from fourfold.errors import UserError
from fourfold.planning.workload import CONTEXTS, RECOMPUTE, SCHEDULES, Workload

AGAIN = {
    "attention_again": np.bool_(False),
    "mlp_again": np.bool_(True),
    "gathers_again": np.bool_(True),
    "stops_early": np.bool_(True),
}
"""The run file's recompute, with the modules that it has when none are named."""
OWN = {"own": np.bool_(True), "gate_first": np.bool_(True)}
"""What other programs do not have."""


def workload_of_model(model: ModelConfig) -> Workload:
    """A workload of the model's sizes on one device, with a batch of one token still to be replaced."""
    queries, keys = (n * model.head_dim for n in (model.num_attention_heads, model.num_key_value_heads))
    ups = model.intermediate_size * (2 if model.gated_mlp else 1)
    return Workload(
        layers=model.num_hidden_layers, hidden=model.hidden_size, queries=queries, keys=keys, head_dim=model.head_dim,
        inner=model.intermediate_size, ups=ups, vocab=model.padded_vocab_size, tied=model.tie_word_embeddings,
        seq=1, batch=1, micro_batch=1, bits=16, reduce_bytes=4, x=1, y=1, z=1, dp=1, cp=1, pp=1, interleave=1, zero=0,
        recompute=0, rope=np.bool_(model.position_embedding == "rope"), biases=np.bool_(model.attention_bias),
        head_norms=np.bool_(model.qk_norm), layer_norm=np.bool_(model.norm == "layernorm"),
        zero_centered=np.bool_(model.zero_centered_norm), turned=model.rotary_dim / model.head_dim,
        parallel_residual=np.bool_(model.parallel_residual), **AGAIN, **OWN,
        positions=model.max_position_embeddings if model.position_embedding == "learned" else 0,
        ends=model.padded_vocab_size * model.hidden_size / model.parameters_per_layer,
    )  # fmt: skip


def workload_of(run: RunConfig) -> Workload:
    """The step that a run file describes. Raises ``UserError`` for LoRA, whose memory and time are others."""
    if run.lora.rank:
        raise UserError("the planner does not predict LoRA; `fourfold trace` counts its memory and its collectives")
    training, grid, again = run.training, run.parallel, run.activation_checkpoint
    values = vars(workload_of_model(run.model)) | {
        "seq": training.seq_length,
        "batch": training.global_batch_size,
        "micro_batch": training.micro_batch_size,
        "bits": 8 if training.float8 != "none" else 32 if training.precision == "fp32" else 16,
        "stored": 4 if training.master_weights == "fp32" else 2,
        "reduce_bytes": 4 if training.reduce_dtype == "fp32" else 2,
        **{axis: getattr(grid, axis) for axis in ("x", "y", "z", "dp", "cp", "pp", "zero")},
        "interleave": stages_per_rank(grid),
        "schedule": SCHEDULES.index(grid.schedule) if grid.pp > 1 else 0,
        "layers_per_stage": grid.layers_per_stage if grid.pp > 1 else None,
        "context": CONTEXTS.index(context_method(run.model, grid, training, run.data.mask_documents)),
        "recompute": RECOMPUTE.index(again.mode),
        "overlap_x": np.bool_(run.overlap.input_gradients),
        "gate_first": np.bool_(run.overlap.gate_sum),
        "overlap_z": np.bool_(run.overlap.weight_prefetch > 0),
        "overlap_dp": np.bool_(True),
        "every": run.activation_checkpoint.every if run.activation_checkpoint.mode != "none" else 1,
        "offload": np.bool_(run.activation_checkpoint.offload),
        "fused": np.bool_(training.compile),
        "prefetch": run.overlap.weight_prefetch,
        "chunk_logits": CHUNK_LOGITS["cpu" if training.device == "cpu" else "cuda"],
        "attention_again": np.bool_("attention" in again.modules),
        "mlp_again": np.bool_("mlp" in again.modules),
        "gathers_again": np.bool_("gathers" in again.modules),
    }
    return Workload(**values)
