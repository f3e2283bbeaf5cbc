"""Architectures that differ from another architecture only in a few keys, defaults, or fixed values."""

from __future__ import annotations

from fourfold.huggingface.architectures.family import Family

_ONE_BIAS = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), "use_bias")
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_LONG = {"head_dim": 128, "max_position_embeddings": 131072}


def variants_of(families: dict[str, Family]) -> dict[str, Family]:
    """Return the architectures that are variants of ``families``."""
    llama, mistral, olmo2 = families["llama"], families["mistral"], families["olmo2"]
    gelu = families["gpt2"].activations
    relu2 = {"relu2": {"mlp": "relu2"}, **gelu}
    glm = llama.variant(
        "GlmForCausalLM",
        {"mlp_bias": None},
        _LONG
        | {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5},
        {"attention_output_bias": False, "mlp_bias": False},
        partial_rotary_factor="partial_rotary_factor",
    )
    return {
        "glm": glm,
        "glm4": glm.variant("Glm4ForCausalLM", {}, {}, {"norm_placement": "around"}),
        "ministral": mistral.variant("MinistralForCausalLM", {}, {}, {}, lists_layer_types=True),
        "vaultgemma": families["gemma2"].variant("VaultGemmaForCausalLM", {}, {}, {"norm_placement": "before"}),
        "ernie4_5": llama.variant(
            "Ernie4_5ForCausalLM",
            _ONE_BIAS,
            _LONG | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
            {},
        ),
        "helium": llama.variant(
            "HeliumForCausalLM",
            {"head_dim": None},  # The output projection has hidden_size inputs.
            {"head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
            {"attention_output_bias": False},
        ),
        "granite": llama.variant(
            "GraniteForCausalLM", {key: key for key in _MULTIPLIERS}, {"attention_multiplier": 1.0}, {}
        ),
        "arcee": llama.variant(
            "ArceeForCausalLM", {}, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, {}, activations=relu2
        ),
        "stablelm": llama.variant(
            "StableLmForCausalLM",
            {"norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias", "mlp_bias": None, "head_dim": None},
            {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
            | {"partial_rotary_factor": 0.25},
            {"norm": "layernorm", "attention_output_bias": False, "mlp_bias": False},
            required={"use_parallel_residual": (False,), "qk_layernorm": (False,)},
            partial_rotary_factor="partial_rotary_factor",
        ),
        "smollm3": llama.variant(
            "SmolLM3ForCausalLM",
            {},
            {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}
            | {"no_rope_layers": None, "no_rope_layer_interval": 4},
            {},
            required={"use_sliding_window": (False,), "sliding_window": (None,)},
            rotating_layers="listed",
        ),
        "exaone4": olmo2.variant(
            "Exaone4ForCausalLM",
            {"attention_bias": None},
            {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
            {"attention_bias": False, "attention_output_bias": False, "qk_norm_over": "head"},
            slides=families["gemma3_text"].slides,
            lists_layer_types=True,
            rotating_layers="sliding",
        ),
        "seed_oss": llama.variant(
            "SeedOssForCausalLM",
            {"attention_output_bias": "attention_out_bias"},
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True},
            {"attention_output_bias": False},
        ),
        "starcoder2": mistral.variant(
            "Starcoder2ForCausalLM",
            _ONE_BIAS | {"norm_eps": "norm_epsilon"},
            {"num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "sliding_window": None}
            | {"tie_word_embeddings": True, "use_bias": True},
            {"norm": "layernorm"},
            activations={"gelu_pytorch_tanh": gelu["gelu_pytorch_tanh"], **gelu},
        ),
    }
