"""Replace layers of a transformers cache with Loki's layers, and keep their contents."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from fourfold.inference.loki.cache import GrowingLayer, LokiLayer
from fourfold.inference.loki.codes import Encoder
from fourfold.inference.loki.settings import LokiConfig

log = logging.getLogger("fourfold.loki")


@dataclass(eq=False)
class LayerRecipe:
    """Settings for the cache of one layer."""

    config: LokiConfig
    encoder: Encoder | None = None
    """The result of ``LokiBasis.of_layer``. None if the layer stays dense."""
    capacity: int = 0
    """Number of tokens to allocate memory for at the start."""
    warned: set[type] = field(default_factory=set)
    """Types of caches that a warning has already named. All recipes of a model share this set."""

    def new_layer(self) -> GrowingLayer:
        return GrowingLayer(self.capacity) if self.encoder is None else LokiLayer(self.encoder, self.capacity)


def replace_layer(cache: Cache, number: int, recipe: LayerRecipe, is_loki: bool) -> GrowingLayer | None:
    """Make a layer of the cache fit ``recipe``. If the layer does not fit and can be replaced, replace it by a new
    layer with the same keys and values.

    Args:
        cache: The cache of all layers.
        number: Index of the layer.
        recipe: The settings that the layer must fit.
        is_loki: Whether the model's current attention is Loki's.

    Returns:
        The layer that is now in the cache. None if it is still a layer of transformers. In this case, attention is
        dense.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    if _is_replaceable(layer, recipe, is_loki):
        layer = cache.layers[number] = _filled_from(layer, recipe)
    elif is_loki and recipe.encoder is not None:
        if isinstance(layer, LokiLayer):
            if layer.encoder is not recipe.encoder:  # Loki was enabled again since the codes were computed.
                layer = cache.layers[number] = _filled_from(layer, recipe)
        elif not isinstance(layer, GrowingLayer) and type(layer) not in recipe.warned:
            recipe.warned.add(type(layer))
            log.warning("layer %d: attention to a cache of type %s is dense", number, type(layer).__name__)
    return layer if isinstance(layer, GrowingLayer) else None


def _is_replaceable(layer: object, recipe: LayerRecipe, is_loki: bool) -> bool:
    """Return whether a layer must be replaced and can be replaced. A layer must be replaced if ``recipe`` asks for
    another type of layer. It can be replaced if it holds all keys and values. A layer with a sliding window holds them
    all only until the window is full."""
    if not is_loki:
        return False
    if type(layer) is DynamicLayer:
        return True
    is_whole = type(layer) is DynamicSlidingWindowLayer and layer.cumulative_length < layer.sliding_window
    return recipe.encoder is not None and (type(layer) is GrowingLayer or is_whole)


def _filled_from(layer: object, recipe: LayerRecipe) -> GrowingLayer:
    """Return a new layer with the keys and values of ``layer``."""
    assert isinstance(layer, CacheLayerMixin)
    new = recipe.new_layer()
    if layer.get_seq_length():
        assert layer.keys is not None and layer.values is not None
        new.update(layer.keys, layer.values)
    return new
