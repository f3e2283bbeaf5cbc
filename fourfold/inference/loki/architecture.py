"""List the models that Loki supports, find their attention modules, and say why Loki does not support some models."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from fourfold.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SUPPORTED = (
    "llama", "mistral", "mixtral", "ministral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gpt_oss",
    "gemma", "gemma3_text", "glm4_moe", "minimax_m2", "seed_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "phi3",
    "phimoe", "granite", "granitemoe", "olmo", "olmo2", "olmo3", "olmoe", "flex_olmo", "apertus", "arcee", "nemotron",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
"""Model types that Loki supports. Their attention is softmax(q·k) v, each layer has its own keys and values, and the
rotary embedding has the half-split layout of Llama. The heads may have learned sinks."""

LACKING = {
    "gemma2": "their attention caps the scores (softcap)",
    "deepseek_v2": "their attention is latent (MLA), so there are no keys per head to rotate",
    "deepseek_v3": "their attention is latent (MLA), so there are no keys per head to rotate",
    "gemma3n": "their layers share keys and values",
    "gpt2": "they have no rotary embedding, and their contexts are short",
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "most of their layers have linear attention"),
}
"""Some of the model types that Loki does not support, each with the reason. All other types that are not in
``SUPPORTED`` are untested."""


class AttentionModule(nn.Module):
    """The attributes of a transformers attention module that Loki uses.

    This class is for type checkers and is never instantiated.
    """

    config: PreTrainedConfig
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    loki: object
    """A ``LayerState`` while Loki is enabled for the model."""
    loki_observer: object
    """The object that receives queries and keys while the context of ``observe_keys`` is open."""


def attentions_of(model: PreTrainedModel) -> list[AttentionModule]:
    """Return the attention module of every layer, in the order of the layers.

    Raises:
        UserError: Loki does not support the model.
    """
    kind = text_config(model).model_type
    if kind in LACKING:
        raise UserError(f"loki: models of type '{kind}' are not supported: {LACKING[kind]}; use dense attention")
    if kind not in SUPPORTED:
        raise UserError(
            f"loki: models of type '{kind}' are untested; supported are {', '.join(SUPPORTED)}; use dense attention"
        )
    modules = [
        cast(AttentionModule, module)
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups") and hasattr(module, "o_proj")
    ]
    found = {module.layer_idx: module for module in modules}
    count = text_config(model).num_hidden_layers
    assert sorted(found) == list(range(count)), f"{kind}: attention modules of layers {sorted(found)}, not of {count}"
    return [found[number] for number in range(count)]


def key_shape(attention: AttentionModule) -> tuple[int, int]:
    """Return the number of KV heads, and then the number of dims of a head (head_dim)."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


def window_of(attention: AttentionModule) -> int | None:
    """Return the number of tokens in a layer's sliding window, or None if the layer sees the whole context. Loki is not
    used in layers with a window.

    Also return None for a window that is at least as long as the model's longest context. Phi-3 and StarCoder2 can have
    such a window.
    """
    kinds = getattr(attention.config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] == "full_attention":
        return None
    declares = attention if kinds is None and hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(declares, "sliding_window", None)
    positions = getattr(attention.config, "max_position_embeddings", None)
    return None if window is not None and positions is not None and window >= positions else window


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of a model's configuration that describes its text decoder."""
    return model.config.get_text_config(decoder=True)
