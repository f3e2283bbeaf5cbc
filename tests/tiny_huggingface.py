"""Small random models of the transformers library, one for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fourfold.huggingface.architectures.config_json import model_of, read_config
from fourfold.huggingface.weights import Pretrained
from fourfold.models.transformer import Transformer

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
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
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
GPT_OSS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 0.7,
    "rope_parameters": YARN | {"truncate": False},
}

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
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
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon biases": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True, "tie_word_embeddings": False}
        | {"ffn_hidden_size": 80, "rope_parameters": YARN},
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
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5 biases": (
        "Qwen3_5TextConfig",
        DELTA
        | {"num_key_value_heads": 8, "attention_bias": True, "linear_conv_kernel_dim": 3, "layer_types": [F, LINEAR]}
        | {"rope_parameters": YARN | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}},
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
    "youtu": ("YoutuConfig", LATENTS | {"initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 1}),
    "glm4_moe norms": (
        "Glm4MoeConfig",
        GLM | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2, "num_mtp_layers": 0},
    ),
}


def make_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model in several files, and return its folder. The weights are random but the same in every call, and
    every parameter affects the results."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    kind, keys = MODELS[name]
    sizes = GPT2 if kind == "GPT2Config" else SIZES
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(sizes | keys | changes)))
    perturb(model)
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


def perturb(model: Any) -> None:
    """Change the vectors of a new model. They are all ones or zeros, so a mistake with one of them would not show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)


def ours_of(folder: Path) -> Transformer:
    """Return our decoder with the weights of a Hugging Face model."""
    model = Transformer(model_of(read_config(folder), str(folder)))
    pretrained = Pretrained(folder, model.config)
    for name, parameter in model.named_parameters():
        pretrained.read_into(parameter.data, name, tuple(slice(0, n) for n in parameter.shape))
    return model


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all weights in the files of a folder."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Replace a folder's weights."""
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    save_file(weights, folder / "model.safetensors")


def tokens() -> Tensor:
    """Return two sequences of random tokens."""
    return torch.randint(201, (2, 40), generator=torch.Generator().manual_seed(0))
