"""Define Loki's cache layers. ``GrowingLayer`` stores keys and values. ``LokiLayer`` also stores the codes of the keys
and the sum of the values.

``replace_cache`` replaces the layers of a transformers cache with these layers, and copies the contents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from fourfold.inference.loki.codes import Encoder
from fourfold.inference.loki.growing_tensor import GrowingTensor
from fourfold.inference.loki.rest import ValueSum


class GrowingLayer(DynamicLayer):
    """A cache layer whose storage for keys and values doubles when it is full. transformers' own layer would copy all
    keys and values for each new token."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.key_buffer, self.value_buffer = GrowingTensor(capacity), GrowingTensor(capacity)

    @property
    def buffers(self) -> tuple[GrowingTensor | ValueSum, ...]:
        return self.key_buffer, self.value_buffer

    @property
    def held_bytes(self) -> int:
        """Return the size of the cached tokens in bytes, not counting unused memory."""
        return sum(buffer.held_bytes for buffer in self.buffers)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return views of all cached keys and of all cached values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key_buffer.append(key_states)
        self.value_buffer.append(value_states)
        return self._set_views()

    def get_seq_length(self) -> int:
        return self.key_buffer.length

    def offload(self) -> None:
        self._each(lambda buffer: buffer.to(torch.device("cpu")))

    def prefetch(self) -> None:
        self._each(lambda buffer: buffer.to(self.device))

    def reset(self) -> None:
        for buffer in self.buffers:
            buffer.clear()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("crop takes minus the number of tokens to remove")
        self._each(lambda buffer: buffer.crop(-tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda buffer: buffer.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda buffer: buffer.repeat(repeats))

    def _each(self, change: Callable[[GrowingTensor | ValueSum], None]) -> None:
        if self.is_initialized:
            for buffer in self.buffers:
                change(buffer)
            self._set_views()

    def _set_views(self) -> tuple[Tensor, Tensor]:
        """Set ``keys`` and ``values``, which transformers reads, to views of the cached tokens. Return the views."""
        keys, values = self.key_buffer.filled, self.value_buffer.filled
        self.keys, self.values = keys, values
        return keys, values


class LokiLayer(GrowingLayer):
    """A cache layer with keys, values, the codes of the keys, [B, K, S, C], and the sum of the values. To rank the
    keys, Loki reads only the codes."""

    def __init__(self, encoder: Encoder, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.encoder = encoder
        self.code_buffer, self.value_sum = GrowingTensor(capacity), ValueSum()
        self.code_BKSC: Tensor | None = None
        """The codes during an attention pass, on the device of the keys that ``update`` returned. The attention reads
        this attribute instead of the buffer, because an offloaded cache has moved its buffers to the CPU by then."""

    @property
    def buffers(self) -> tuple[GrowingTensor | ValueSum, ...]:
        return self.key_buffer, self.value_buffer, self.code_buffer, self.value_sum

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.code_buffer.append(self.encoder.encode(key_states))
        self.code_BKSC = self.code_buffer.filled
        return super().update(key_states, value_states)
