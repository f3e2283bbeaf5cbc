"""Implement Loki as a transformers attention function, with the state that each attention module carries.

transformers calls ``loki_attention`` with the keys and values that the cache returned, but not with the cache itself. A
hook before each attention module (``before_attention``) finds the cache and replaces its layers with the layers in
``cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import AttentionModule
from fourfold.inference.loki.attend import decode
from fourfold.inference.loki.cache import GrowingLayer, LokiLayer
from fourfold.inference.loki.codes import BITS, Encoder
from fourfold.inference.loki.dense import dense_attention
from fourfold.inference.loki.replace_cache import LayerRecipe, replace_layer
from fourfold.inference.loki.select import keys_per_sequence
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.simulate import Probe, simulate

NAME = "loki"
"""The name under which transformers registers ``loki_attention`` and its mask function."""


@dataclass(eq=False)
class LayerState:
    """The state that an attention module carries while Loki is enabled."""

    recipe: LayerRecipe
    before: str
    """Name of the attention implementation that the model used before Loki was enabled."""
    hooks: tuple[RemovableHandle, ...] = ()
    layer: GrowingLayer | None = None
    """The layer of the cache that belongs to this module, while a pass runs. None if it is not one of Loki's layers."""
    is_exact: bool = False
    """Whether a simulation ranks keys by their exact scores instead of their codes."""
    probe: Probe | None = None
    """Records the quality of the chosen keys. None if the quality is not measured."""

    def release(self) -> None:
        """Drop the references to the cache layer and its codes, so that the model does not keep them in memory after a
        pass."""
        if isinstance(self.layer, LokiLayer):
            self.layer.code_BKSC = None
        self.layer = None


def state_of(module: nn.Module) -> LayerState | None:
    """Return an attention module's state, or None if Loki is not enabled."""
    state = getattr(module, "loki", None)
    return state if isinstance(state, LayerState) else None


def before_attention(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Find the module's cache layer before a pass, and replace it if it does not fit Loki's settings."""
    state = state_of(module)
    assert state is not None
    hidden_states = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
    recipe = state.recipe
    if recipe.encoder is not None and recipe.encoder.keys_KDd.device != hidden_states.device:
        # If this pass runs in inference mode, leave the mode. Otherwise a later pass with gradients could not use the
        # new encoder.
        with torch.inference_mode(False):
            recipe.encoder = recipe.encoder.to(hidden_states.device)
    state.release()
    # Before version 5.24, transformers used the name past_key_values.
    cache = keywords.get("cache", keywords.get("past_key_values"))
    if isinstance(cache, Cache):
        attention = cast(AttentionModule, module)
        is_loki = attention.config._attn_implementation == NAME
        state.layer = replace_layer(cache, attention.layer_idx, recipe, is_loki)


def after_attention(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """Drop the module's references to the cache after a pass, even if the pass has failed."""
    state = state_of(module)
    assert state is not None
    state.release()


def loki_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend with Loki if it applies to this call, and otherwise to all keys. This is an attention function for
    transformers.

    Args:
        module: The attention module.
        query: Queries [B, N, Q, D].
        key: Keys [B, K, S, D].
        value: Values [B, K, S, D].
        attention_mask: Mask [B, 1, Q, S], True if a query sees a key. None for causal attention without padding.
        scaling: Factor that the products of queries and keys are multiplied by. None means 1 / √D.
        dropout: Probability of dropping an attention weight. If it is not 0, attention is dense.

    Returns:
        The output [B, Q, N, D], and None in place of the weights.

    Raises:
        UserError: The model extends attention in a way that Loki does not support, or a simulation is not given a whole
            prompt at once.
    """
    state = state_of(module)
    encoder = None if state is None else state.recipe.encoder
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def dense() -> tuple[Tensor, None]:
        return dense_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **keywords)

    # Either this layer stays dense, or Loki is not enabled in this model. transformers calls this function for such a
    # model too, if the model shares its configuration object with a model that has Loki.
    if state is None or encoder is None:
        return dense()
    if keywords.get("softcap") is not None:
        raise UserError("loki: this model's attention has softcap, which is not supported; use dense attention")
    config, layer = state.recipe.config, state.layer
    if dropout:  # The model is in training, and Loki is only for inference.
        return dense()
    length, is_simple = key.shape[2], _is_simple(attention_mask)
    if query.shape[2] == 1 and isinstance(layer, LokiLayer) and is_simple and not config.is_dense_at(length):
        visible_B1S = None if attention_mask is None else attention_mask[:, :, 0].expand(query.shape[0], -1, -1)
        out = _decode(query[:, :, 0], key, value, layer, encoder, config, scaling, visible_B1S, keywords.get("s_aux"))
        return out[:, None], None
    if config.prefill == "simulate" and query.shape[2] > 1 and not config.is_dense_at(length):
        if query.shape[2] == length and is_simple:  # The cache holds only this prompt.
            ranked_by = None if state.is_exact else encoder
            sinks_N = keywords.get("s_aux")
            out = simulate(query, key, value, ranked_by, config, scaling, attention_mask, state.probe, sinks_N)
            return out.transpose(1, 2).contiguous(), None
        raise UserError(
            'loki: prefill = "simulate" needs a whole prompt at once, an empty dynamic cache, and no custom mask; '
            'leave prefill at "dense", or give the prompt in one piece'
        )
    return dense()


def _decode(
    query_BND: Tensor,
    key: Tensor,
    value: Tensor,
    layer: LokiLayer,
    encoder: Encoder,
    config: LokiConfig,
    scaling: float,
    visible_B1S: Tensor | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Run a decoding step on a layer of the cache, and return the step's output, [B, N, D]."""
    assert layer.code_BKSC is not None
    if config.bits != BITS:
        raise UserError(f"loki: bits = {config.bits} works only in `fourfold loki evaluate --text`; use {BITS}")
    k, k_B = config.key_count(key.shape[2]), None
    if visible_B1S is not None:
        k, k_B = config.largest_key_count(key.shape[2]), keys_per_sequence(visible_B1S[:, 0].sum(-1), config)
    value_sum_BKD = layer.value_sum.of(value, visible_B1S)
    codes = layer.code_BKSC
    return decode(query_BND, key, value, value_sum_BKD, codes, encoder, k, config, scaling, visible_B1S, k_B, sinks_N)


def _is_simple(mask: Tensor | None) -> bool:
    """Return whether a mask is None, or boolean and the same for all heads, like the masks of transformers' sdpa_mask.
    Loki supports only such masks."""
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1)
