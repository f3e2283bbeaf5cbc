"""List the keys of [model] that have no effect if another key has a certain value. Setting such a key is an error."""

from __future__ import annotations

from typing import Any

_OF_EXPERTS = {
    "router_score": "softmax",
    "norm_topk_prob": True,
    "router_bias": False,
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 0,
    "shared_expert_gate": False,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
"""Keys that need experts, with their default values."""

_OF_LATENTS = dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
"""Keys that need latent attention, with their default values."""

NOT_WITH_LATENTS: dict[str, Any] = dict.fromkeys(
    ("attention_bias", "attention_output_bias", "attention_output_gate", "qk_norm", "attention_sinks"), False
) | {"partial_rotary_factor": 1.0, "sliding_window": 0, "linear_num_key_heads": 0}
"""Keys that must have their default values with latent attention."""

NO_MEANING: tuple[tuple[str, Any, str, Any], ...] = (
    ("rope_scaling", None, "position_embedding", "learned"),
    ("rope_local_base_freq", 0.0, "position_embedding", "learned"),
    ("no_rope_layers", [], "position_embedding", "learned"),
    ("rope_local_base_freq", 0.0, "sliding_window", 0),
    ("partial_rotary_factor", 1.0, "position_embedding", "learned"),
    ("zero_centered_norm", False, "norm", "layernorm"),
    ("norm_rounds_last", False, "norm", "layernorm"),
    ("norm_rounds_last", False, "zero_centered_norm", True),
    ("gelu_approximation", "tanh", "mlp", "swiglu"),
    ("gelu_approximation", "tanh", "mlp", "relu2"),
    ("swiglu_limit", 0.0, "mlp", "geglu"),
    ("swiglu_limit", 0.0, "mlp", "gelu"),
    ("swiglu_limit", 0.0, "mlp", "relu2"),
    ("qk_norm_over", "head", "qk_norm", False),
    ("norm_placement", "before", "parallel_residual", True),
    *((key, unset, "num_experts", 0) for key, unset in _OF_EXPERTS.items()),
    *((key, unset, "kv_lora_rank", 0) for key, unset in _OF_LATENTS.items()),
)
"""Tuples (key, default, other key, value). If the other key has this value, the key has no effect and must keep its
default."""
