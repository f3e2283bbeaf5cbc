"""Switching Loki on and off in a model of transformers."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fourfold.errors import UserError
from fourfold.inference.loki.architecture import attentions_of, key_shape, text_config, window_of
from fourfold.inference.loki.basis import LokiBasis
from fourfold.inference.loki.cache import GrowingLayer
from fourfold.inference.loki.fingerprint import Fingerprint
from fourfold.inference.loki.loki_attention import NAME, LayerState, leave_cache, loki_attention, meet_cache
from fourfold.inference.loki.replace_cache import LayerRecipe
from fourfold.inference.loki.settings import LokiConfig
from fourfold.inference.loki.traffic import dense_bytes, floor_bytes

log = logging.getLogger("fourfold.loki")


def enable_loki(
    model: nn.Module, basis: LokiBasis, config: LokiConfig | None = None, *, capacity: int = 0
) -> nn.Module:
    """Let a model attend with Loki from now on; the same model is returned.

    ``model.generate`` and ``model(...)`` work as before, with any cache of transformers: its layers are exchanged as
    they are met. Calling it again changes basis and configuration. capacity: tokens to make room for at once, where
    the length is known.

    Layers with a sliding window stay dense, with a message. Raises ``UserError`` for a basis of another model, an
    architecture that Loki does not know, and a configuration that does not fit the model.
    """
    config = config or LokiConfig()
    attentions = attentions_of(model)
    basis.fingerprint.check(Fingerprint.of(text_config(model), attentions))
    basis.check_shape(len(attentions), *key_shape(attentions[0]))
    recipes = _recipes(attentions, basis, config, capacity)
    parameter = next(model.parameters())
    if config.kernels_for(parameter.device, parameter.dtype) == "numba":
        from fourfold.inference.loki.numba_kernels import compile_for

        compile_for(parameter.dtype, recipes[0].proxy_dtype or parameter.dtype)
    disable_loki(model)
    # Without a mask of the same name transformers would pass none at all: neither causality nor padding.
    AttentionInterface.register(NAME, loki_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = text_config(model)._attn_implementation
    if before == NAME:  # of another model, with which this one shares its configuration
        before = "sdpa"
    model.set_attn_implementation(NAME)
    for attention, recipe in zip(attentions, recipes, strict=True):
        attention.loki = LayerState(recipe, before)
        attention.loki_hooks = (
            attention.register_forward_pre_hook(meet_cache, with_kwargs=True),
            attention.register_forward_hook(leave_cache, always_call=True),
        )
    return model


def disable_loki(model: nn.Module) -> nn.Module:
    """Give a model its own attention back. A cache of rotated keys cannot be used any more; others can.

    An attention that was set since Loki was enabled stays. Models that share their configuration share the choice of
    attention: another one that has Loki attends densely from now on.
    """
    attentions = [module for module in model.modules() if isinstance(getattr(module, "loki", None), LayerState)]
    for attention in attentions:
        before = attention.loki.before
        attention.loki.release()
        for hook in attention.loki_hooks:
            hook.remove()
        del attention.loki, attention.loki_hooks
    if attentions and text_config(model)._attn_implementation == NAME:
        model.set_attn_implementation(before)
    return model


def cache_bytes(cache: Any) -> int:
    """What the tokens in a cache take, in bytes, without room to grow."""
    total = 0
    for layer in cache.layers:
        if hasattr(layer, "held_bytes"):
            total += layer.held_bytes
        elif getattr(layer, "is_initialized", False):
            total += layer.keys.nbytes + layer.values.nbytes
    return total


def step_bytes(model: nn.Module, cache: Any) -> tuple[int, int] | None:
    """What the next step would read of the keys and values of a growing cache at least, in bytes; and full attention.

    None for a model without Loki, and where a layer of the cache is not Loki's.
    """
    states = [module.loki for module in model.modules() if isinstance(getattr(module, "loki", None), LayerState)]
    if not states or not all(isinstance(layer, GrowingLayer) and layer.get_seq_length() for layer in cache.layers):
        return None
    read = dense = 0
    for state, layer in zip(states, cache.layers, strict=True):
        batch, heads, length, head_dim = layer.keys.shape
        itemsize, recipe = layer.keys.element_size(), state.recipe
        proxy_itemsize = itemsize if recipe.proxy_dtype is None else recipe.proxy_dtype.itemsize
        of_all = dense_bytes(length, head_dim, heads, itemsize)
        is_sparse = not recipe.is_dense and not recipe.config.is_dense_at(length)
        k = recipe.config.keys_of(length)
        of_step = floor_bytes(length, head_dim, recipe.d, k, heads, itemsize, proxy_itemsize) if is_sparse else of_all
        read += batch * of_step
        dense += batch * of_all
    return read, dense


def _recipes(attentions: list[nn.Module], basis: LokiBasis, config: LokiConfig, capacity: int) -> list[LayerRecipe]:
    unknown = [number for number in config.skip_layers if not 0 <= number < len(attentions)]
    if unknown:
        raise UserError(f"loki: skip_layers has {unknown[0]}, and the layers are 0 to {len(attentions) - 1}")
    recipes, windows, warned = [], {}, set()
    for number, attention in enumerate(attentions):
        window = window_of(attention)
        if window is not None:
            windows[number] = window
        if window is not None or number in config.skip_layers:
            recipes.append(LayerRecipe(config, capacity=capacity, warned=warned))
        else:
            recipes.append(LayerRecipe(config, *basis.of_layer(number, config), capacity=capacity, warned=warned))
    if len(config.skip_layers) and all(recipe.is_dense for recipe in recipes):
        raise UserError("loki: skip_layers leaves no layer to Loki; leave some out of it, or use full attention")
    if len(windows) == len(attentions):
        raise UserError(
            f"loki: every layer of this model sees only the last {max(windows.values())} tokens (sliding_window); use "
            "full attention, which reads no more than these"
        )
    if windows:
        log.warning("layers %s have a sliding window and stay dense", ", ".join(map(str, windows)))
    return recipes
