"""Puts Loki's layers into a cache of transformers, whatever it holds, or refuses what would give wrong logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from fourfold.errors import UserError
from fourfold.inference.loki.cache import GrowingLayer, LokiLayer, RotatedLayer, StaticLokiLayer
from fourfold.inference.loki.settings import LokiConfig

log = logging.getLogger("fourfold.loki")


@dataclass(eq=False)
class LayerRecipe:
    """How the cache of one layer is made.

    basis_KDD: its whole basis, in float32; None for a layer that stays dense. d: leading dims that rank. capacity:
    tokens to make room for at once. warned: of which types of cache there has been a warning; the recipes of a model
    share it.
    """

    config: LokiConfig
    basis_KDD: Tensor | None = None
    d: int = 0
    capacity: int = 0
    warned: set[type] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.basis_KDd = None if self.basis_KDD is None else self.basis_KDD[..., : self.d].contiguous()

    @property
    def proxy_dtype(self) -> torch.dtype | None:
        """None: that of the keys."""
        return torch.bfloat16 if self.config.proxy_dtype == "bf16" else None

    @property
    def is_dense(self) -> bool:
        return self.basis_KDD is None

    def to(self, device: torch.device) -> None:
        """Follow the layer to its device."""
        if self.basis_KDD is not None and self.basis_KDD.device != device:
            with torch.inference_mode(False):  # it outlives the pass
                self.basis_KDD, self.basis_KDd = self.basis_KDD.to(device), self.basis_KDd.to(device)

    def new_layer(self) -> GrowingLayer:
        if self.is_dense:
            return GrowingLayer(self.capacity)
        if self.config.cache == "rotated":
            return RotatedLayer(self.basis_KDD, self.d, self.capacity)
        return LokiLayer(self.basis_KDd, self.capacity, self.proxy_dtype)


def adopt(cache: Cache, number: int, recipe: LayerRecipe, is_loki: bool) -> Any:
    """The layer of a cache for an attention that follows ``recipe``; what it held is taken over.

    is_loki: whether the model's attention is Loki's now. Returns None for a layer that stays as it is, and is attended
    to densely. Raises ``UserError`` for a cache that cannot be used.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    if isinstance(layer, RotatedLayer):
        return _rotated(layer, recipe, is_loki)
    is_ranked = is_loki and not recipe.is_dense
    is_whole = type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length < layer.sliding_window
    if (type(layer) is DynamicLayer and is_loki) or (is_ranked and (type(layer) is GrowingLayer or is_whole)):
        layer = cache.layers[number] = _filled(recipe.new_layer(), layer)
    elif type(layer) is StaticLayer and is_ranked:
        layer = cache.layers[number] = _fixed(layer, recipe)
    elif isinstance(layer, LokiLayer | StaticLokiLayer) and not recipe.is_dense:
        if not _is_of(layer, recipe):
            layer = cache.layers[number] = _made_anew(layer, recipe)
        layer.basis = recipe.basis_KDd
    if isinstance(layer, StaticLokiLayer) and is_ranked:
        _check_fixed(layer.max_cache_len, recipe.config)
    if isinstance(layer, GrowingLayer | StaticLokiLayer):
        return layer
    if is_ranked and type(layer) not in recipe.warned:
        recipe.warned.add(type(layer))
        log.warning("layer %d: a cache of type %s is attended to densely", number, type(layer).__name__)
    return None


def _filled(new: GrowingLayer, layer: DynamicLayer) -> GrowingLayer:
    if isinstance(new, RotatedLayer):
        new.expected = True
    if layer.get_seq_length():
        new.update(layer.keys, layer.values)
        if isinstance(new, RotatedLayer):
            new.expected = True
    return new


def _fixed(layer: StaticLayer, recipe: LayerRecipe) -> StaticLokiLayer:
    _check_fixed(layer.max_cache_len, recipe.config)
    fixed = StaticLokiLayer(recipe.basis_KDd, layer.max_cache_len, recipe.proxy_dtype)
    fixed.take_over(layer)
    return fixed


def _check_fixed(size: int, config: LokiConfig) -> None:
    """How much of a cache of fixed size is filled is not known to the host, so nothing may depend on it."""
    if config.k is None or config.cache == "rotated":
        raise UserError(
            'loki: a cache of fixed size needs cache = "proxy" and a number of keys, because how much of it is filled '
            "is not known to the host; give k instead of k_f"
        )
    if config.k < config.min_seq <= size:
        raise UserError(
            f"loki: a cache of fixed size cannot stay dense below min_seq = {config.min_seq} tokens, because how much "
            f"of it is filled is not known to the host; give min_seq = 0, or k of at least {config.min_seq}, with "
            "which all shorter contexts are attended to wholly"
        )


def _rotated(layer: RotatedLayer, recipe: LayerRecipe, is_loki: bool) -> RotatedLayer:
    """Only the very basis, and an attention that knows of it, can read rotated keys."""
    if not is_loki or recipe.is_dense or recipe.config.cache != "rotated" or not _is_of(layer, recipe):
        raise UserError(
            "this cache holds keys that were rotated by another basis, or for another attention than the model has "
            'now; start a new cache, or use cache = "proxy", which fits any attention'
        )
    # How many rotated dims rank is free.
    layer.basis, layer.d, layer.expected = recipe.basis_KDD, recipe.d, True
    return layer


def _made_anew(layer: LokiLayer | StaticLokiLayer, recipe: LayerRecipe) -> GrowingLayer | StaticLokiLayer:
    """Raw keys are there, so the proxy for another basis or width can be made of them."""
    return _fixed(layer, recipe) if isinstance(layer, StaticLokiLayer) else _filled(recipe.new_layer(), layer)


def _is_of(layer: LokiLayer | RotatedLayer | StaticLokiLayer, recipe: LayerRecipe) -> bool:
    """Whether a layer was filled with this basis, in this type."""
    ours = recipe.basis_KDD if isinstance(layer, RotatedLayer) else recipe.basis_KDd
    if not isinstance(layer, RotatedLayer) and layer.proxy_dtype != recipe.proxy_dtype:
        return False
    if layer.basis is ours:  # as it is at every step but the first
        return True
    return layer.basis.shape == ours.shape and torch.equal(layer.basis.to(ours.device), ours)
