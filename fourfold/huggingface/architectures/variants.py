"""Architectures that differ from another architecture only in a few keys, defaults, or fixed values."""

from __future__ import annotations

from fourfold.huggingface.architectures.family import TOPK_METHOD, Family

_NO_BIASES = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), False)
_ONE_BIAS = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), "use_bias")
_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_LATENTS = {key: key for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
_LATENT_WIDTHS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
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
    deepseek = families["glm4_moe"].variant(
        "DeepseekV3ForCausalLM",
        _LATENTS
        | {"n_group": "n_group", "topk_group": "topk_group"}
        | dict.fromkeys(("head_dim", "attention_bias", "qk_norm")),
        _LATENT_WIDTHS
        | {"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "n_routed_experts": 256}
        | {"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
        | {"routed_scaling_factor": 2.5, "partial_rotary_factor": None},
        {"attention_bias": False, "qk_norm": False},
        required={"rope_interleave": (True,), "attention_bias": (False,)},
        partial_rotary_factor=None,
        quantization={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    return {
        "deepseek_v3": deepseek,
        "deepseek_v2": deepseek.variant(
            "DeepseekV2ForCausalLM",
            {"norm_topk_prob": None},
            {
                "max_position_embeddings": 2048,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "moe_intermediate_size": 1407,
            }
            | {"first_k_dense_replace": 0, "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0}
            | {"topk_method": "greedy"},
            {"router_score": "softmax", "router_bias": False, "norm_topk_prob": False},
            other_names={"num_experts": "n_routed_experts"},
            required={
                "attention_bias": (False,),
                "mlp_bias": (False,),
                TOPK_METHOD: ("greedy", "group_limited_greedy"),
            },
        ),
        "youtu": llama.variant(
            "YoutuForCausalLM",
            _LATENTS | dict.fromkeys(("head_dim", "attention_bias", "mlp_bias")),
            _LATENT_WIDTHS
            | {"num_key_value_heads": 16, "max_position_embeddings": 131072, "tie_word_embeddings": True},
            _NO_BIASES,
            required={"rope_interleave": (True,), "attention_bias": (False,)},
        ),
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
