"""Named models, with their published sizes under the keys of ``ModelConfig``."""

from __future__ import annotations

import difflib
from typing import Any

from fourfold.config.expected_values import shown
from fourfold.errors import UserError

_GPT: dict[str, Any] = {
    "mlp": "gelu",
    "norm": "layernorm",
    "position_embedding": "learned",
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "vocab_size": 50257,
}

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _gpt(layers: int, hidden: int, heads: int, context: int = 2048) -> dict[str, Any]:
    return {
        **_GPT,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
    }


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        **more,
    }


def _experts(experts: int, chosen: int, inner: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, **more}


_MIXTRAL: dict[str, Any] = {"vocab_size": 32000, "rope_theta": 1e6}

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "qk_norm": True,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}

_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "head_dim": 64,
    "attention_sinks": True,
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "norm_rounds_last"), True),
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


PRESETS: dict[str, dict[str, Any]] = {
    # These are small enough for tests and laptops.
    "gpt-tiny": _gpt(2, 64, 4, 256),
    "gpt-demo": _gpt(4, 256, 8, 1024),
    "llama-tiny": _llama(2, 64, 8, 4, 176, vocab_size=257),
    "llama-12m": _llama(8, 320, 8, 4, 864, vocab_size=4096),
    "moe-tiny": _llama(2, 64, 8, 4, 176, vocab_size=257, qk_norm=True, **_experts(8, 2, 48)),
    # GPT-2 (Radford et al. 2019, table 2).
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    # AxoNN (Singh et al. 2025, arXiv 2502.08145, table of models).
    "gpt-5b": _gpt(24, 4096, 32),
    "gpt-10b": _gpt(32, 5120, 40),
    "gpt-20b": _gpt(32, 7168, 56),
    "gpt-40b": _gpt(38, 9216, 72),
    "gpt-60b": _gpt(56, 9216, 72),
    "gpt-80b": _gpt(42, 12288, 96),
    "gpt-160b": _gpt(84, 12288, 96),
    "gpt-320b": _gpt(96, 16384, 128),
    "gpt-640b": _gpt(192, 16384, 128),
    # Frontier (Dash et al. 2023, arXiv 2312.12705, and its code).
    "frontier-22b": _gpt(48, 6144, 48),
    "frontier-175b": _gpt(96, 12288, 96),
    "frontier-1t": _gpt(128, 25600, 128),
    # Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783, table 3).
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, **_LLAMA3),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, **_LLAMA3),
    # Mistral 7B (Jiang et al. 2023, arXiv 2310.06825, table 1).
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, vocab_size=32000, max_position_embeddings=8192, sliding_window=4096),
    # Gemma 2 (Riviere et al. 2024, arXiv 2408.00118, table 1, and its config.json).
    "gemma2-2b": _llama(
        26,
        2304,
        8,
        4,
        9216,
        head_dim=256,
        vocab_size=256000,
        max_position_embeddings=8192,
        norm_eps=1e-6,
        mlp="geglu",
        norm_placement="around",
        zero_centered_norm=True,
        scale_embeddings=True,
        tie_word_embeddings=True,
        sliding_window=4096,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    # Mixtral (Jiang et al. 2024, arXiv 2401.04088, table 1, and the larger model's config.json).
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, **_MIXTRAL, **_experts(8, 2, 14336), max_position_embeddings=32768),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, **_MIXTRAL, **_experts(8, 2, 16384), max_position_embeddings=65536),
    # Qwen3 (Yang et al. 2025, arXiv 2505.09388, table 2, and their config.json).
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 6144, **_QWEN3, **_experts(128, 8, 768)),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 12288, **_QWEN3, **_experts(128, 8, 1536)),
    # GPT-OSS (OpenAI 2025, arXiv 2508.10925, table 1, and their config.json).
    "gpt-oss-20b": _llama(24, 2880, 64, 8, 2880, **_GPT_OSS, **_experts(32, 4, 2880)),
    "gpt-oss-120b": _llama(36, 2880, 64, 8, 2880, **_GPT_OSS, **_experts(128, 4, 2880)),
    # OLMoE (Muennighoff et al. 2024, arXiv 2409.02060, and its config.json).
    "olmoe-1b-7b": _llama(
        16,
        2048,
        16,
        16,
        1024,
        **_experts(64, 8, 1024, norm_topk_prob=False),
        vocab_size=50304,
        max_position_embeddings=4096,
        qk_norm=True,
        qk_norm_over="all_heads",
    ),
}


def with_preset(section: dict[str, Any], given_as: str = "model.preset =") -> dict[str, Any]:
    """Fill a ``[model]`` table from its ``preset``. The table's own keys take precedence.

    Raises:
        UserError: The preset is unknown. The message begins with ``given_as``, the key or option that named it.
    """
    name = section.get("preset")
    if name is None:
        return section
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PRESETS)}"
        raise UserError(f"{given_as} {shown(name)} is not a preset; {hint}")
    return filled(section, PRESETS[name])


def filled(section: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a ``[model]`` table with its missing keys filled from defaults. Missing keys of ``rope_scaling`` are
    filled too if the type is the same."""
    both = {**defaults, **section}
    of_default, own = defaults.get("rope_scaling"), section.get("rope_scaling")
    if (
        isinstance(of_default, dict)
        and isinstance(own, dict)
        and own.get("rope_type") in (None, of_default["rope_type"])
    ):
        both["rope_scaling"] = {**of_default, **own}
    return both
