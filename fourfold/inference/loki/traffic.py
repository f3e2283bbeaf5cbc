"""Count the bytes that a cache holds, and the bytes that a decoding step reads from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from fourfold.inference.loki.cache import GrowingLayer
from fourfold.inference.loki.loki_attention import state_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
            tensors = tree_leaves(layer if isinstance(layer, Tensor) else vars(layer))
            total += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    return total


def step_bytes(model: PreTrainedModel, cache: Cache | None) -> tuple[int, int] | None:
    """Return the smallest number of bytes that the next step reads from the keys and values in a dynamic cache, and the
    number of bytes that full attention reads.

    Return None if the model does not use Loki, or if a layer of the cache is not one of Loki's layers.
    """
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    if not states or cache is None:
        return None
    layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer) and layer.get_seq_length()]
    if len(layers) < len(cache.layers):
        return None
    read = dense = 0
    for state, layer in zip(states, layers, strict=True):
        keys, recipe = layer.key_buffer.filled, state.recipe
        batch, heads, length, head_dim = keys.shape
        itemsize = keys.element_size()
        proxy_itemsize = itemsize if recipe.proxy_dtype is None else recipe.proxy_dtype.itemsize
        of_all = of_step = dense_bytes(length, head_dim, heads, itemsize)
        if recipe.basis is not None and not recipe.config.is_dense_at(length):
            k = recipe.config.key_count(length)
            of_step = floor_bytes(length, head_dim, recipe.basis.d, k, heads, itemsize, proxy_itemsize)
        read += batch * of_step
        dense += batch * of_all
    return read, dense


def floor_bytes(
    length: int, head_dim: int, d: int, k: int, heads: int, itemsize: int, proxy_itemsize: int | None = None
) -> int:
    """Return the smallest number of bytes that a step can read for one sequence: d dims of every key, and k whole keys
    and values.

    Args:
        length: Number of tokens in the cache.
        head_dim: Size of a head.
        d: Number of ranking dims.
        k: Number of keys that the step attends to.
        heads: Number of KV heads.
        itemsize: Number of bytes per element of the cache.
        proxy_itemsize: Number of bytes per element of the proxy (default: ``itemsize``).
    """
    return heads * (length * d * (proxy_itemsize or itemsize) + 2 * k * head_dim * itemsize)


def dense_bytes(length: int, head_dim: int, heads: int, itemsize: int) -> int:
    """Return the number of bytes that full attention reads for one sequence, which are all keys and values."""
    return heads * itemsize * 2 * length * head_dim
