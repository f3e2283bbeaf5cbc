"""The transformers architectures that the decoder can compute. ``variants.toml`` describes some of them by their
differences from another architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fourfold.huggingface.architectures.family import Family
from fourfold.huggingface.architectures.variants import with_variants


def _every(layer: int, given: Mapping[str, Any]) -> bool:
    return True


def _all_but_every(period: int) -> Callable[[int, Mapping[str, Any]], bool]:
    return lambda layer, given: bool((layer + 1) % period)


def _all_but_patterns_last(layer: int, given: Mapping[str, Any]) -> bool:
    return bool((layer + 1) % given["sliding_window_pattern"])


def _from_the_nth_on(layer: int, given: Mapping[str, Any]) -> bool:
    return bool(layer >= given["max_window_layers"])


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SAME_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "initializer_range",
)  # fmt: skip
_LLAMA_KEYS = {key: key for key in (*_SAME_NAMES, "num_key_value_heads", "head_dim")} | {"norm_eps": "rms_norm_eps"}
_LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_NO_BIASES = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
_LLAMA_FIXED = {"norm": "rmsnorm", "position_embedding": "rope", "qk_norm": False}
_SWIGLU = {name: {"mlp": "swiglu"} for name in ("silu", "swish")}
_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GEGLU = {"gelu_pytorch_tanh": {"mlp": "geglu", "gelu_approximation": "tanh"}}
_GELU = {name: {"mlp": "gelu", "gelu_approximation": "tanh"} for name in _TANH_GELUS} | {
    "gelu": {"mlp": "gelu", "gelu_approximation": "none"}
}
_EXPERT_KEYS = {key: key for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")}
_OLMO_FIXED = _LLAMA_FIXED | {
    "norm_placement": "after",
    "mlp_bias": False,
    "qk_norm": True,
    "qk_norm_over": "all_heads",
}
_GEMMA_KEYS = _LLAMA_KEYS | {key: key for key in ("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping")}
_GEMMA_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_FIXED = _LLAMA_FIXED | {"mlp_bias": False, "zero_centered_norm": True, "scale_embeddings": True}
_AROUND = {"norm_placement": "around"}
_GPT2_KEYS = {key: key for key in ("vocab_size", "tie_word_embeddings", "initializer_range")} | {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
_GPT2_DEFAULTS = {"n_positions": 1024, "n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5}
_GPT2_FIXED = dict.fromkeys(_NO_BIASES, True) | {"norm": "layernorm", "position_embedding": "learned", "qk_norm": False}
_GPT_NEOX_KEYS = {key: key for key in (*_SAME_NAMES, "attention_bias")} | {
    "norm_eps": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
}
_GPT_NEOX_DEFAULTS = {
    "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True, "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
}  # fmt: skip
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA_KEYS | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        _LLAMA_DEFAULTS,
        _LLAMA_FIXED,
        _SWIGLU,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        _LLAMA_FIXED | _NO_BIASES,
        _SWIGLU,
        slides=_every,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | _QWEN_WINDOW | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        _LLAMA_FIXED | _NO_BIASES | {"attention_bias": True},
        _SWIGLU,
        slides=_from_the_nth_on,
        lists_layer_types=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_KEYS | {"attention_bias": "attention_bias"},
        _LLAMA_DEFAULTS | _QWEN_WINDOW | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        _LLAMA_FIXED | {"mlp_bias": False, "qk_norm": True},
        _SWIGLU,
        slides=_from_the_nth_on,
        lists_layer_types=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _LLAMA_KEYS | {"attention_bias": "attention_bias"},
        _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5},
        _OLMO_FIXED,
        _SWIGLU,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _LLAMA_KEYS | {"attention_bias": "attention_bias"},
        _LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        _OLMO_FIXED,
        _SWIGLU,
        slides=_all_but_every(4),
        lists_layer_types=True,
        rope_local_theta=5e5,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _LLAMA_KEYS,
        _LLAMA_DEFAULTS | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        _LLAMA_FIXED | _NO_BIASES,
        _SWIGLU,
        partial_rotary_factor="partial_rotary_factor",
        rope_types=(),  # longrope is the only scaling that transformers implements for Phi-3.
        slides=_every,
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _LLAMA_KEYS | {"attention_bias": "attention_bias"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        _GEMMA_FIXED,
        # The family's first files say "gelu" but mean the tanh approximation, and transformers reads it that way.
        _GEGLU | {"gelu": _GEGLU["gelu_pytorch_tanh"]},
        required={"use_bidirectional_attention": (None, False)},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _GEMMA_FIXED | _AROUND,
        _GEGLU,
        "hidden_activation",
        {"use_bidirectional_attention": (None, False)},
        slides=_all_but_every(2),
        lists_layer_types=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_KEYS,
        _GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window_pattern": 6, "rope_theta": 1e6},
        _GEMMA_FIXED | _AROUND | {"qk_norm": True},
        _GEGLU,
        "hidden_activation",
        {"use_bidirectional_attention": (None, False)},
        slides=_all_but_patterns_last,
        lists_layer_types=True,
        rope_local_theta=1e4,
        reads_local_theta=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _GPT_NEOX_KEYS,
        _GPT_NEOX_DEFAULTS,
        {"norm": "layernorm", "position_embedding": "rope", "mlp_bias": True, "qk_norm": False},
        {"gelu": _GELU["gelu"]} | _GELU,
        rope_theta="rotary_emb_base",
        partial_rotary_factor="rotary_pct",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_KEYS,
        _GPT2_DEFAULTS,
        _GPT2_FIXED,
        _GELU,
        "activation_function",
        {"scale_attn_weights": (True,)}
        | dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (False,)),
        other_names={  # transformers ignores intermediate_size here.
            ours: theirs
            for ours, theirs in _GPT2_KEYS.items()
            if theirs.startswith("n_") and ours in _SAME_NAMES and theirs != "n_inner"
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA_KEYS | {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        _LLAMA_FIXED | _NO_BIASES | {"norm_topk_prob": True},
        _SWIGLU,
        required={"router_jitter_noise": (0.0,)},
        other_names={"num_experts": "num_local_experts"},
        slides=_every,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA_KEYS | _EXPERT_KEYS | {"attention_bias": "attention_bias"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 768, "norm_topk_prob": False}
        | {"use_sliding_window": False, "sliding_window": 4096},
        _LLAMA_FIXED | {"mlp_bias": False, "qk_norm": True},
        _SWIGLU,
        required={"decoder_sparse_step": (1,)},
        other_names={"num_local_experts": "num_experts"},
        dense_layers="mlp_only_layers",
        slides=_every,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _LLAMA_KEYS
        | _EXPERT_KEYS
        | {"attention_bias": "qkv_bias", "shared_expert_intermediate_size": "shared_expert_intermediate_size"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "norm_topk_prob": False, "qkv_bias": True}
        | {"shared_expert_intermediate_size": 5632}
        | _QWEN_WINDOW,
        _LLAMA_FIXED | {"attention_output_bias": False, "mlp_bias": False, "shared_expert_gate": True},
        _SWIGLU,
        required={"decoder_sparse_step": (1,)},
        dense_layers="mlp_only_layers",
        slides=lambda layer, given: layer % 2 == 0 and layer < given["max_window_layers"],
        lists_layer_types=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        # The query and key norms span all heads and have hidden_size weights, so head_dim follows from hidden_size.
        {ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours != "head_dim"}
        | {key: key for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob", "attention_bias")},
        _LLAMA_DEFAULTS
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False},
        _LLAMA_FIXED | {"mlp_bias": False, "qk_norm": True, "qk_norm_over": "all_heads"},
        _SWIGLU,
        required={"clip_qkv": (None,)},
        other_names={"num_local_experts": "num_experts"},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _LLAMA_KEYS
        | _EXPERT_KEYS
        | {"attention_bias": "attention_bias", "num_experts": "n_routed_experts", "qk_norm": "use_qk_norm"}
        | {key: key for key in ("routed_scaling_factor", "first_k_dense_replace")},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "n_routed_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "use_qk_norm": False, "partial_rotary_factor": 0.5},
        {key: value for key, value in _LLAMA_FIXED.items() if key != "qk_norm"}
        | {"attention_output_bias": False, "mlp_bias": False, "router_score": "sigmoid", "router_bias": True},
        _SWIGLU,
        required={"n_group": (1,), "topk_group": (1,)},
        partial_rotary_factor="partial_rotary_factor",
        other_names={"num_local_experts": "n_routed_experts"},
        shared_experts="n_shared_experts",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _LLAMA_KEYS
        | {key: key for key in ("num_experts_per_tok", "swiglu_limit", "attention_bias")}
        | {"num_experts": "num_local_experts"},
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"attention_bias": True, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE},
        _LLAMA_FIXED | {"norm_topk_prob": True, "mlp_bias": True, "attention_sinks": True, "norm_rounds_last": True},
        _SWIGLU,
        required={"swiglu_alpha": (1.702,)},
        other_names={"num_experts": "num_local_experts"},
        slides=_all_but_every(2),
        lists_layer_types=True,
        quantization={"quant_method": "mxfp4"},
    ),
}
FAMILIES = with_variants(FAMILIES)

MISSING: dict[str, str] = {
    "phi": "parallel attention and MLP with one shared norm, and a bias in the head",
    "gemma3": "images (only its text model, 'gemma3_text', is supported)",
    "phimoe": "experts that sparsemixer chooses",
    "llama4": "experts with scaled inputs, and chunked attention",
}
"""Maps refused architectures to the features that the decoder lacks for them."""
