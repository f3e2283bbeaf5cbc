"""Replace layers of a transformers cache with Loki's layers, and refuse caches that would give wrong logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from fourfold.errors import UserError
from fourfold.inference.loki.basis import LayerBasis
from fourfold.inference.loki.cache import GrowingLayer, LokiLayer, RankedLayer, RotatedLayer
from fourfold.inference.loki.settings import LokiConfig

log = logging.getLogger("fourfold.loki")


@dataclass(eq=False)
class LayerRecipe:
    """Settings for the cache of one layer."""

    config: LokiConfig
    basis: LayerBasis | None = None
    """Basis of the layer. None if the layer stays dense."""
    capacity: int = 0
    """Number of tokens to allocate memory for at the start."""
    warned: set[type] = field(default_factory=set)
    """Types of caches that a warning has already named. All recipes of a model share this set."""

    @property
    def proxy_dtype(self) -> torch.dtype | None:
        """Return the dtype of the proxy. None means the dtype of the keys."""
        return torch.bfloat16 if self.config.proxy_dtype == "bf16" else None

    def new_layer(self) -> GrowingLayer:
        if self.basis is None:
            return GrowingLayer(self.capacity)
        if self.config.cache == "rotated":
            return RotatedLayer(self.basis.whole_KDD, self.basis.d, self.capacity)
        return LokiLayer(self.basis.leading_KDd, self.capacity, self.proxy_dtype)


def replace_layer(cache: Cache, number: int, recipe: LayerRecipe, is_loki: bool) -> GrowingLayer | None:
    """Replace a layer of the cache with a layer with the same contents that fits ``recipe``, unless the layer already
    fits or cannot be replaced.

    Args:
        number: Index of the layer.
        is_loki: Whether the model's current attention is Loki's.

    Returns:
        The layer that is now in the cache, or None if it is a layer of transformers, for which attention is dense.

    Raises:
        UserError: The layer's keys are rotated, and the model's current attention cannot read them.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    if isinstance(layer, RotatedLayer):
        return _checked_rotated(layer, recipe, is_loki)
    if _is_replaceable(layer, recipe, is_loki):
        layer = cache.layers[number] = _filled_from(layer, recipe)
    elif is_loki and recipe.basis is not None:
        if isinstance(layer, LokiLayer):
            layer = cache.layers[number] = _with_current_basis(layer, recipe, recipe.basis)
        elif not isinstance(layer, GrowingLayer) and type(layer) not in recipe.warned:
            recipe.warned.add(type(layer))
            log.warning("layer %d: attention to a cache of type %s is dense", number, type(layer).__name__)
    return layer if isinstance(layer, GrowingLayer) else None


def _is_replaceable(layer: object, recipe: LayerRecipe, is_loki: bool) -> bool:
    """Return whether a layer can and must be replaced: it holds all keys and values without rotation, and ``recipe``
    asks for another type of layer. (A layer with a sliding window holds all of them until the window is full.)"""
    if not is_loki:
        return False
    if type(layer) is DynamicLayer:
        return True
    is_whole = type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length < layer.sliding_window
    return recipe.basis is not None and (type(layer) is GrowingLayer or is_whole)


def _filled_from(layer: object, recipe: LayerRecipe) -> GrowingLayer:
    """Return a new layer with the keys and values of ``layer``, which are not rotated."""
    assert isinstance(layer, CacheLayerMixin)
    new = recipe.new_layer()
    if isinstance(new, RotatedLayer):
        new.expected = True
    if layer.get_seq_length():
        assert layer.keys is not None and layer.values is not None
        new.update(layer.keys, layer.values)
        if isinstance(new, RotatedLayer):
            new.expected = True
    return new


def _checked_rotated(layer: RotatedLayer, recipe: LayerRecipe, is_loki: bool) -> RotatedLayer:
    """Return the layer unchanged.

    Raise ``UserError`` unless Loki runs with the same basis, because the keys are rotated by that basis.
    """
    basis = recipe.basis
    if not is_loki or basis is None or recipe.config.cache != "rotated" or not _has_basis(layer, recipe, basis):
        raise UserError(
            "this cache holds keys that were rotated by another basis, or for another attention than the model has "
            'now; start a new cache, or use cache = "proxy", which fits any attention'
        )
    # Update the dims too, because the number of ranking dims may have changed.
    layer.basis, layer.d, layer.expected = basis.whole_KDD, basis.d, True
    return layer


def _with_current_basis(layer: LokiLayer, recipe: LayerRecipe, basis: LayerBasis) -> GrowingLayer:
    """Return the layer. If the basis, the number of ranking dims, or the proxy's dtype has changed, return a new layer
    whose proxy is computed again from the keys."""
    if _has_basis(layer, recipe, basis):
        layer.basis = basis.leading_KDd
        return layer
    return _filled_from(layer, recipe)


def _has_basis(layer: RankedLayer, recipe: LayerRecipe, basis: LayerBasis) -> bool:
    """Return whether a layer was filled with this basis, and its proxy has the dtype that ``recipe`` asks for."""
    if not isinstance(layer, RotatedLayer) and layer.proxy_dtype != recipe.proxy_dtype:
        return False
    ours = basis.whole_KDD if isinstance(layer, RotatedLayer) else basis.leading_KDd
    if layer.basis is ours:  # In all steps except the first, this is the same tensor.
        return True
    return layer.basis.shape == ours.shape and torch.equal(layer.basis.to(ours.device), ours)
