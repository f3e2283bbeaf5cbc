"""Count the bytes that a cache holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache

from fourfold.inference.loki.cache import GrowingLayer
from fourfold.torch_internals import tensors_in


def cache_bytes(cache: Cache | Sequence[Tensor] | None) -> int | None:
    """Return the size in bytes of all tensors in a cache, including recurrent states.

    Unused memory of a growing cache is not counted. Return None for a model without a cache.
    """
    if cache is None:
        return None
    total = 0
    for layer in cache if isinstance(cache, Sequence) else cache.layers:
        if isinstance(layer, GrowingLayer):
            total += layer.held_bytes
        else:
            total += sum(each.nbytes for each in tensors_in(layer if isinstance(layer, Tensor) else vars(layer)))
    return total
