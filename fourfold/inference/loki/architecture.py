"""Which models Loki knows: the attention modules of their layers, and what cannot be had."""

from __future__ import annotations

from typing import Any

from torch import nn

from fourfold.errors import UserError

SUPPORTED = (
    "llama",
    "mistral",
    "mixtral",
    "ministral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "granite",
    "olmo",
    "olmo2",
    "olmo3",
    "smollm3",
    "starcoder2",
)
"""Types of models whose attention is softmax(q·k) v on one cache per layer, with whole heads turned in halves."""

LACKING = {
    "gemma2": "its attention caps the scores (softcap)",
    "gpt_oss": "its attention has sinks of its own",
    "deepseek_v2": "its attention is latent (MLA): there are no keys per head to rotate",
    "deepseek_v3": "its attention is latent (MLA): there are no keys per head to rotate",
    "gemma3n": "its layers share keys and values",
    "gpt2": "it has no rotary embedding, and its contexts are short",
}


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """The attention module of every layer, in order. Raises ``UserError`` for a model that Loki does not know."""
    kind = text_config(model).model_type
    if kind in LACKING:
        raise UserError(f"loki: models of type '{kind}' cannot have it: {LACKING[kind]}; use full attention")
    if kind not in SUPPORTED:
        raise UserError(
            f"loki: models of type '{kind}' have not been tried; it knows {', '.join(SUPPORTED)}; use full attention"
        )
    found = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups") and hasattr(module, "o_proj")
    }
    count = text_config(model).num_hidden_layers
    assert sorted(found) == list(range(count)), f"{kind}: attention modules of layers {sorted(found)}, not of {count}"
    return [found[number] for number in range(count)]


def key_shape(attention: nn.Module) -> tuple[int, int]:
    """How many KV heads an attention has, and of how many dims."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


def window_of(attention: nn.Module) -> int | None:
    """The sliding window of a layer, which sees no long context and stays dense; None where it sees everything.

    A window of all positions that the model has, as Phi-3 and StarCoder2 may declare one, hides nothing.
    """
    window = _declared_window(attention)
    positions = getattr(attention.config, "max_position_embeddings", None)
    return None if window is not None and positions is not None and window >= positions else window


def _declared_window(attention: nn.Module) -> int | None:
    config = attention.config
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return config.sliding_window if kinds[attention.layer_idx] != "full_attention" else None
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None)


def text_config(model: Any) -> Any:
    """The part of a model's configuration that describes its text decoder."""
    return model.config.get_text_config(decoder=True)
