"""Convert a run file to a workload: the planner's description of one training step (``workload.Workload``)."""

from fourfold.config.layout import CHUNK_LOGITS, context_method
from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import active_parameters_per_layer
from fourfold.config.run import RunConfig
from fourfold.config.stages import stages_per_rank
from fourfold.errors import UserError
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.program_flags import Program
from fourfold.planning.workload import CP_METHODS, OPTIMIZERS, RECOMPUTE, SCHEDULES, Layout, Step, Workload

SAME_SIZES = (
    "hidden_size", "head_dim", "padded_vocab_size", "tie_word_embeddings", "attention_bias",
    "qk_norm", "zero_centered_norm", "parallel_residual", "sliding_window", "num_experts",
    "shared_expert_intermediate_size", "shared_expert_gate", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
"""Sizes that have the same name in ``ModelConfig`` and in ``ModelShape``."""


def model_shape(model: ModelConfig) -> ModelShape:
    """Return the sizes of a run file's model."""
    depths = model.num_nextn_predict_layers
    # A prediction layer has the same types of attention and MLP as the model's last layer.
    layers = [*range(model.num_hidden_layers), *[model.num_hidden_layers - 1] * depths]
    sparse, kinds = sum(map(model.is_sparse, layers)), [model.type_of(layer) for layer in layers]
    inner = model.intermediate_size if sparse < len(layers) else 0
    is_learned, has_experts = model.position_embedding == "learned", model.num_experts > 0
    return ModelShape(
        **{name: getattr(model, name) for name in SAME_SIZES}, num_hidden_layers=len(layers),
        queries=model.num_attention_heads * model.head_dim, keys=model.num_key_value_heads * model.head_dim,
        intermediate_size=inner, gate_up=inner * (2 if model.gated_mlp else 1), clamps_gate=model.swiglu_limit > 0,
        rope=0 if is_learned else 2 if model.rope_local_base_freq else 1,
        rotary_share=model.rotary_dim / model.head_dim, rotated=sum(map(model.rotates, layers)) / len(layers),
        positions=model.max_position_embeddings if is_learned else 0,
        joint_head_norms=model.qk_norm_over == "all_heads", layer_norm=model.norm == "layernorm",
        norms=4 if model.norm_placement == "around" else 2, output_norms=model.norm_placement != "before",
        sliding=kinds.count("sliding_attention") / len(layers), output_gate=model.attention_output_gate,
        caps_scores=model.attn_logit_softcapping > 0, caps_logits=model.final_logit_softcapping > 0,
        num_experts_per_tok=model.num_experts_per_tok if has_experts else 0,
        moe_intermediate_size=model.moe_intermediate_size if has_experts else 0, sparse=sparse / len(layers),
        q_latent=model.q_lora_rank, kv_latent=model.kv_lora_rank, shared_key=model.qk_rope_head_dim,
        latent_values=model.num_attention_heads * model.v_head_dim if model.kv_lora_rank else 0,
        linear=kinds.count("linear_attention") / len(layers),
        after_linear=kinds[::-1].index("linear_attention") if "linear_attention" in kinds else 0,
        predictions=depths, prediction_width=model.hidden_size if depths else 0,
    )  # fmt: skip


def workload_of_model(model: ModelConfig) -> Workload:
    """Return a workload of one token on one device, trained with fourfold. Set the batch and the layout with
    ``Workload.but``."""
    return Workload(model_shape(model), Layout(end_layers=_end_layers(model)))


def workload_of(run: RunConfig) -> Workload:
    """Return the workload of one step of a run.

    Raises:
        UserError: The run uses LoRA or DPO, which the planner does not model.
    """
    if run.lora.rank:
        raise UserError(
            f"lora.rank = {run.lora.rank}: the planner does not predict LoRA, but `fourfold trace` counts its memory "
            "and collectives; set lora.rank = 0 to plan the run without LoRA"
        )
    if run.dpo.beta:
        raise UserError(
            f"dpo.beta = {run.dpo.beta}: the planner does not predict [dpo], but `fourfold trace` counts its memory "
            "and collectives; set dpo.beta = 0 to plan the run without [dpo]"
        )
    training, grid, recompute = run.training, run.parallel, run.activation_checkpoint
    layout = Layout(
        x=grid.x, y=grid.y, z=grid.z, dp=grid.dp, cp=grid.cp, pp=grid.pp, ep=grid.ep, zero=grid.zero,
        stages_per_rank=stages_per_rank(grid), schedule=SCHEDULES.index(grid.schedule) if grid.pp > 1 else 0,
        cp_method=CP_METHODS.index(context_method(run)), batch_parts=run.overlap.batch_parts,
        micro_batch_size=training.micro_batch_size, end_layers=_end_layers(run.model),
        recompute=RECOMPUTE.index(recompute.mode), offload=recompute.offload,
        recompute_every=recompute.every if recompute.mode != "none" else 1,
        layers_per_stage=grid.layers_per_stage if grid.pp > 1 else None,
    )  # fmt: skip
    weight_bytes = 4 if training.master_weights == "fp32" else 2
    step = Step(
        seq_length=training.seq_length,
        global_batch_size=training.global_batch_size,
        bits=8 if training.float8 != "none" else 32 if training.precision == "fp32" else 16,
        reduce_bytes=4 if training.reduce_dtype == "fp32" else 2,
        weight_bytes=weight_bytes,
        moment_bytes=4 if run.optimizer.stochastic_rounding else weight_bytes,
        optimizer=OPTIMIZERS.index(run.optimizer.name),
        averaged=run.ema.decay > 0,
        capacity=run.moe.capacity_factor,
    )
    program = Program(
        fused=training.compile,
        fused_loss=training.device != "cpu",
        chunk_logits=CHUNK_LOGITS["cpu" if training.device == "cpu" else "cuda"],
        overlap_x=run.overlap.input_gradients, gate_first=run.overlap.gate_sum,
        overlap_z=run.overlap.weight_prefetch > 0, prefetch=run.overlap.weight_prefetch,
        shards_per_node=run.overlap.shards_per_node,
        **{f"recomputes_{each}": each in recompute.modules for each in ("attention", "mlp", "norms", "gathers")},
    )  # fmt: skip
    return Workload(model_shape(run.model), layout, step, program)


def _end_layers(model: ModelConfig) -> float:
    """Return how many layers the head counts as when layers are divided into stages. The embedding counts as the same
    number of layers."""
    return model.padded_vocab_size * model.hidden_size / active_parameters_per_layer(model)
