"""Sizes of small mixture-of-experts models of the transformers library, for every family."""

from __future__ import annotations

from typing import Any

from tiny_dense_models import DELTA, LATENTS, MULTIPLIERS, YARN, F, S

EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 0.7,
    "rope_parameters": YARN | {"truncate": False},
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("GraniteMoeConfig", MULTIPLIERS | {"num_key_value_heads": 2, "num_local_experts": 6}),
    "granitemoe biases": ("GraniteMoeConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        MULTIPLIERS | {"num_key_value_heads": 2, "num_local_experts": 6, "shared_intermediate_size": 40},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        MULTIPLIERS
        | {"num_key_value_heads": 2, "sliding_window": 7, "shared_intermediate_size": 40, "layer_rope_theta": [0, 3e3]},
    ),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 5, "sliding_window": None}),
    "mixtral tied": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe dense": ("Qwen3MoeConfig", EXPERTS | {"attention_bias": True, "mlp_only_layers": [0]}),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe no biases": (
        "Qwen2MoeConfig",
        EXPERTS | {"shared_expert_intermediate_size": 40, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "olmoe": ("OlmoeConfig", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3}),
    "glm4_moe": ("Glm4MoeConfig", GLM | {"head_dim": 16, "routed_scaling_factor": 2.5, "num_mtp_layers": 0}),
    "solar_open": ("SolarOpenConfig", GLM | {"head_dim": 16, "routed_scaling_factor": 2.5, "n_shared_experts": 2}),
    "solar_open biases": ("SolarOpenConfig", GLM | {"head_dim": 8, "attention_bias": True, "norm_topk_prob": False}),
    "dots1": (
        "Dots1Config",
        GLM | {"n_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 7, "layer_types": [F, S]},
    ),
    "dots1 biases": (
        "Dots1Config",
        GLM | {"n_shared_experts": 1, "attention_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "sarvam_moe": ("SarvamMoEConfig", GLM | {"head_dim": 16, "n_shared_experts": 2}),
    "sarvam_moe biases": ("SarvamMoEConfig", GLM | {"head_dim": 8, "attention_bias": True, "use_qk_norm": False}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        EXPERTS
        | {"num_experts": 8, "num_shared_experts": 2, "n_group": 2, "topk_group": 1}
        | {"sliding_window": 7, "layer_types": [S, F]},
    ),
    "exaone_moe sparse": (
        "ExaoneMoeConfig",
        EXPERTS | {"mlp_layer_types": ["sparse", "sparse"], "norm_topk_prob": False, "sliding_window_pattern": 2},
    ),
    "hy_v3": ("HYV3Config", EXPERTS | {"head_dim": 16, "num_shared_experts": 2}),
    "hy_v3 biases": (
        "HYV3Config",
        EXPERTS | {"head_dim": 8, "attention_bias": True, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "flint": (
        "FlintConfig",
        EXPERTS | {"num_hidden_layers": 4, "head_dim": 16, "shared_expert_intermediate_size": 40, "sliding_window": 7},
    ),
    "flint full": (
        "FlintConfig",
        EXPERTS
        | {"head_dim": 16, "shared_expert_intermediate_size": 40, "attention_bias": True, "norm_topk_prob": False}
        | {"layer_types": [F, F], "mlp_only_layers": [0]},
    ),
    "mellum": (
        "MellumConfig",
        EXPERTS | {"head_dim": 16, "layer_types": [F, S], "sliding_window": 7, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "mellum biases": (
        "MellumConfig",
        EXPERTS
        | {"head_dim": 8, "attention_bias": True, "norm_topk_prob": False, "layer_types": [S, F], "sliding_window": 9}
        | {"rope_parameters": {F: YARN, S: {"rope_type": "default", "rope_theta": 300.0}}},
    ),
    "flex_olmo": ("FlexOlmoConfig", EXPERTS),
    "flex_olmo biases": ("FlexOlmoConfig", EXPERTS | {"attention_bias": True, "norm_topk_prob": True, "head_dim": 16}),
    "aria_text": ("AriaTextConfig", {"num_key_value_heads": 2, "moe_num_experts": 6}),
    "aria_text biases": ("AriaTextConfig", {"attention_bias": True, "head_dim": 16, "moe_num_shared_experts": 1}),
    "qwen3_next": ("Qwen3NextConfig", EXPERTS | DELTA),
    "qwen3_next dense": (
        "Qwen3NextConfig",
        EXPERTS
        | DELTA
        | {"attention_bias": True, "norm_topk_prob": False, "mlp_only_layers": [0], "linear_num_value_heads": 2}
        | {"tie_word_embeddings": True, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", EXPERTS | DELTA),
    "qwen3_5_moe full": ("Qwen3_5MoeTextConfig", EXPERTS | DELTA | {"layer_types": [F, F]}),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "gpt_oss no biases": (
        "GptOssConfig",
        GPT_OSS | {"attention_bias": False, "layer_types": [F, S], "rope_parameters": {"rope_type": "default"}},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENTS | GROUPED | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek_v3 no query latents": (
        "DeepseekV3Config",
        LATENTS | GROUPED | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "sarvam_mla": ("SarvamMLAConfig", LATENTS | GROUPED | {"q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENTS | GROUPED),
    "glm4_moe_lite sparse": (
        "Glm4MoeLiteConfig",
        LATENTS
        | GROUPED
        | {"mlp_layer_types": ["sparse", "sparse"], "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek_v2": ("DeepseekV2Config", LATENTS | GROUPED | {"topk_method": "group_limited_greedy", "mlp_bias": False}),
    "deepseek_v2 greedy": (
        "DeepseekV2Config",
        LATENTS | GROUPED | {"q_lora_rank": None, "n_group": None, "topk_group": None},
    ),
    "glm4_moe norms": (
        "Glm4MoeConfig",
        GLM | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2, "num_mtp_layers": 0},
    ),
}
"""The class of the configuration, and the keys that differ from ``SIZES``, by a name for the tests."""
