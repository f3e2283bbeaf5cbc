"""The transformers architectures that the decoder can compute. ``variants.toml`` describes most of them by their
differences from another architecture."""

from __future__ import annotations

from fourfold.huggingface.architectures.family import Family
from fourfold.huggingface.architectures.variants import with_variants

_SAME_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "initializer_range",
)  # fmt: skip
_GELU = {name: {"mlp": "gelu", "gelu_approximation": "tanh"} for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")}
_GELU["gelu"] = {"mlp": "gelu", "gelu_approximation": "none"}
_GPT2_KEYS = {key: key for key in ("vocab_size", "tie_word_embeddings", "initializer_range")} | {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip

FAMILIES = with_variants({
    "llama": Family(
        "LlamaForCausalLM",
        {key: key for key in (*_SAME_NAMES, "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias")}
        | {"norm_eps": "rms_norm_eps"},
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        {"norm": "rmsnorm", "position_embedding": "rope", "qk_norm": False},
        {name: {"mlp": "swiglu"} for name in ("silu", "swish")},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {key: key for key in (*_SAME_NAMES, "attention_bias")}
        | {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
        {
            "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True,
            "max_position_embeddings": 2048, "rotary_pct": 0.25,
        },
        {"norm": "layernorm", "position_embedding": "rope", "mlp_bias": True, "qk_norm": False},
        {"gelu": _GELU["gelu"]} | _GELU,
        rope_theta="rotary_emb_base",
        partial_rotary_factor="rotary_pct",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_KEYS,
        {"n_positions": 1024, "n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        {
            "attention_bias": True, "attention_output_bias": True, "mlp_bias": True,
            "norm": "layernorm", "position_embedding": "learned", "qk_norm": False,
        },
        _GELU,
        "activation_function",
        {"scale_attn_weights": (True,)}
        | dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (False,)),
        other_names={  # transformers ignores the key intermediate_size for GPT-2.
            ours: theirs
            for ours, theirs in _GPT2_KEYS.items()
            if theirs.startswith("n_") and ours in _SAME_NAMES and theirs != "n_inner"
        },
    ),
})  # fmt: skip

MISSING: dict[str, str] = {
    "phi": "parallel attention and MLP with one shared norm, and a bias in the head",
    "gemma3": "images (only its text model, 'gemma3_text', is supported)",
    "phimoe": "sparsemixer, its method to choose experts",
    "llama4": "experts with scaled inputs, and chunked attention",
}
"""Maps refused architectures to the features that the decoder lacks for them."""
