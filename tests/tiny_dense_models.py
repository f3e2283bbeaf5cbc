"""Sizes of small dense models of the transformers library, for every family."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 201,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 201, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 8, "initializer_range": 0.2}
LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NEOX_LINEAR = {"rope_theta": 2e4, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
F, S, LINEAR = "full_attention", "sliding_attention", "linear_attention"
QWEN_WINDOW = {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
GEMMA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}
GEMMA_LINEAR = {"rope_theta": 1e5, "rope_type": "linear", "factor": 8.0}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENTS = {
    "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "layer_types": [LINEAR, F],
    "initializer_range": 0.1,
    "shared_expert_intermediate_size": 40,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama gqa tied": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama mqa biases": ("LlamaConfig", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("LlamaConfig", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama yarn": ("LlamaConfig", {"head_dim": 16, "rope_parameters": YARN}),
    "llama linear": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 12}),
    "mistral sliding": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen2 sliding": ("Qwen2Config", QWEN_WINDOW),
    "qwen2 tied": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3 tied": ("Qwen3Config", {"num_key_value_heads": 8, "head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    "phi3 partial": ("Phi3Config", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma biases": (
        "GemmaConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 9,
            "layer_types": [S, F],
            "rope_parameters": {F: YARN, S: {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        GEMMA | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 3, "layer_types": [S, S, F]}),
    "gemma3 stretched": (
        "Gemma3TextConfig",
        GEMMA
        | {"layer_types": [F, S], "final_logit_softcapping": 3.0, "tie_word_embeddings": False}
        | {"rope_parameters": {F: GEMMA_LINEAR, S: {"rope_type": "default", "rope_theta": 300.0}}},
    ),
    "ministral": (
        "MinistralConfig",
        {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7, "layer_types": [F, S]},
    ),
    "seed_oss": ("SeedOssConfig", {"num_key_value_heads": 2, "head_dim": 16}),
    "seed_oss biases": (
        "SeedOssConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": False, "attention_out_bias": True},
    ),
    "starcoder2": ("Starcoder2Config", {"num_key_value_heads": 2, "sliding_window": 7}),
    "starcoder2 no biases": (
        "Starcoder2Config",
        {"num_key_value_heads": 4, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        GEMMA | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "granite": ("GraniteConfig", {"num_key_value_heads": 2} | MULTIPLIERS),
    "granite tied biases": (
        "GraniteConfig",
        MULTIPLIERS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        MULTIPLIERS | {"num_key_value_heads": 2, "sliding_window": 7, "layer_rope_theta": [0, 3e3]},
    ),
    "granite_swa biases": (
        "GraniteSWAConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "layer_types": [S, F]}
        | {"sliding_window": 9, "rope_parameters": YARN},
    ),
    "hyperclovax": ("HyperCLOVAXConfig", MULTIPLIERS | {"num_key_value_heads": 2}),
    "hyperclovax biases": (
        "HyperCLOVAXConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "cwm": ("CwmConfig", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7}),
    "cwm biases": (
        "CwmConfig",
        {"num_key_value_heads": 2, "head_dim": 8, "mlp_bias": True, "layer_types": [S, F], "sliding_window": 9}
        | {"rope_parameters": YARN},
    ),
    "exaone": ("ExaoneConfig", {"num_key_value_heads": 2}),
    "exaone biases": (
        "ExaoneConfig",
        {"num_key_value_heads": 8, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "internlm3": ("InternLM3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "internlm3 biases": ("InternLM3Config", {"head_dim": 8, "qkv_bias": True, "bias": True}),
    "iquestcoder": ("IQuestCoderConfig", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    "jais2": ("Jais2Config", {"num_key_value_heads": 2}),
    "jais2 no biases": ("Jais2Config", {"head_dim": 16, "attention_bias": False, "mlp_bias": False}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_hidden_layers": 3, "attention_types": [[["local", "global"], 1], [["local"], 1]], "window_size": 7},
    ),
    "gpt_neo untied": (
        "GPTNeoConfig",
        {"attention_types": [[["global"], 2]], "intermediate_size": None, "tie_word_embeddings": False},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "arcee": ("ArceeConfig", {"num_key_value_heads": 2}),
    "arcee biases": (
        "ArceeConfig",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "stablelm": ("StableLmConfig", {"num_key_value_heads": 2}),
    "stablelm biases": (
        "StableLmConfig",
        {"num_key_value_heads": 8, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "smollm3": ("SmolLM3Config", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),
    "smollm3 biases": (
        "SmolLM3Config",
        {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "exaone4": ("Exaone4Config", {"num_key_value_heads": 2, "sliding_window": 7, "layer_types": [S, F]}),
    "exaone4 full": (
        "Exaone4Config",
        {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": None, "layer_types": [F, F]},
    ),
    "helium": ("HeliumConfig", {"num_key_value_heads": 2, "head_dim": 8}),
    "helium biases": (
        "HeliumConfig",
        {"num_key_value_heads": 8, "head_dim": 8, "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN},
    ),
    "glm": ("GlmConfig", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm whole": (
        "GlmConfig",
        {"num_key_value_heads": 4, "head_dim": 12, "attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "glm4": ("Glm4Config", {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.75}),
    "ernie4_5": ("Ernie4_5Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "ernie4_5 biases": (
        "Ernie4_5Config",
        {"num_key_value_heads": 8, "head_dim": 8, "use_bias": True, "tie_word_embeddings": False},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox in turn": (
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "hidden_act": "gelu_new", "rope_parameters": NEOX_LINEAR},
    ),
    "gpt_neox tied": ("GPTNeoXConfig", {"attention_bias": False, "tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {}),
    "gpt2 untied": (
        "GPT2Config",  # transformers ignores intermediate_size.
        {"tie_word_embeddings": False, "n_inner": 100, "intermediate_size": 70, "layer_norm_epsilon": 1e-4},
    ),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon biases": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True, "tie_word_embeddings": False}
        | {"ffn_hidden_size": 80, "rope_parameters": YARN},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5 biases": (
        "Qwen3_5TextConfig",
        DELTA
        | {"num_key_value_heads": 8, "attention_bias": True, "linear_conv_kernel_dim": 3, "layer_types": [F, LINEAR]}
        | {"rope_parameters": YARN | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}},
    ),
    "youtu": ("YoutuConfig", LATENTS | {"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1}),
}
"""The class of the configuration, and the keys that differ from ``SIZES``, by a name for the tests."""
