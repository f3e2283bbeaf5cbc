"""The cache: preallocated keys and values, and beside them the keys' leading rotated dims, contiguous.

Layers take the place of transformers' own in a cache of theirs, and adopt what these hold already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from fourfold.errors import UserError
from fourfold.inference.loki.attend import project
from fourfold.inference.loki.growing_tensor import Plane


class GrowingLayer(DynamicLayer):
    """Keys and values in planes that grow by doubling, where transformers copies all of them at every token."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.key_plane, self.value_plane = Plane(capacity), Plane(capacity)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.key_plane, self.value_plane

    def release(self) -> None:
        """The attention that met this layer is through, or was interrupted."""

    @property
    def held_bytes(self) -> int:
        """What the tokens in the cache take, without room to grow."""
        return sum(plane.held_bytes for plane in self.planes)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values: views, no copies."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key_plane.append(key_states)
        self.value_plane.append(value_states)
        return self._show()

    def get_seq_length(self) -> int:
        return self.key_plane.length

    def offload(self) -> None:
        self._each(lambda plane: plane.to(torch.device("cpu")))

    def prefetch(self) -> None:
        self._each(lambda plane: plane.to(self.device))

    def reset(self) -> None:
        for plane in self.planes:
            plane.clear()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("crop takes minus the number of tokens to remove")
        self._each(lambda plane: plane.crop(-tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda plane: plane.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda plane: plane.repeat(repeats))

    def _each(self, change: Callable[[Plane], None]) -> None:
        if self.is_initialized:
            for plane in self.planes:
                change(plane)
            self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        """What the methods of transformers see."""
        self.keys, self.values = self.key_plane.view, self.value_plane.view
        return self.keys, self.values


class LokiLayer(GrowingLayer):
    """Raw keys and values, and a proxy [B, K, S, d] of the keys, which alone is read to rank them.

    proxy_dtype: by default the keys'. proxy_BKSd: as the last update returned the keys, on their device: a
    cache that is offloaded has moved its planes to the CPU before the attention reads them. None once that is through.
    """

    def __init__(self, basis_KDd: Tensor, capacity: int = 0, proxy_dtype: torch.dtype | None = None) -> None:
        super().__init__(capacity)
        self.basis, self.proxy_dtype = basis_KDd, proxy_dtype
        self.proxy_plane = Plane(capacity)
        self.proxy_BKSd: Tensor | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.key_plane, self.value_plane, self.proxy_plane

    def release(self) -> None:
        self.proxy_BKSd = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.proxy_plane.append(project(key_states, self.basis, self.proxy_dtype))
        self.proxy_BKSd = self.proxy_plane.view
        return super().update(key_states, value_states)


class RotatedLayer(GrowingLayer):
    """Rotated keys only: no more memory than a dense cache, and useless to attention that does not rotate its queries.

    ``expected``: set by the attention that will, for one pass; without it an update is refused. proxy_BKSd: as
    ``LokiLayer`` has it.
    """

    def __init__(self, basis_KDD: Tensor, d: int, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.basis, self.d = basis_KDD, d
        self.expected = False
        self.proxy_BKSd: Tensor | None = None

    def release(self) -> None:
        self.expected, self.proxy_BKSd = False, None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Rotate and append. Raises ``UserError`` where the attention would not know that the keys are rotated."""
        if not self.expected:
            raise UserError(
                "this cache holds keys rotated for Loki, and the model's attention is another now; enable Loki again "
                'with the same basis, start a new cache, or use cache = "proxy", which fits any attention'
            )
        self.expected = False
        keys, values = super().update(project(key_states, self.basis), value_states)
        self.proxy_BKSd = keys[..., : self.d]
        return keys, values


class StaticLokiLayer(StaticLayer):
    """As ``LokiLayer`` with buffers of fixed size and address, for CUDA graphs; what is not filled is masked."""

    def __init__(self, basis_KDd: Tensor, max_cache_len: int, proxy_dtype: torch.dtype | None = None) -> None:
        super().__init__(max_cache_len)
        self.basis, self.proxy_dtype = basis_KDd, proxy_dtype
        self.held_proxy_BKSd: Tensor | None = None
        self.proxy_BKSd: Tensor | None = None

    def release(self) -> None:
        self.proxy_BKSd = None

    @property
    def held_bytes(self) -> int:
        held = (self.keys, self.values, self.held_proxy_BKSd)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        shape = (self.batch_size, self.num_heads, self.max_cache_len, self.basis.shape[-1])
        self.held_proxy_BKSd = torch.zeros(shape, dtype=self.proxy_dtype or self.dtype, device=self.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
        self.held_proxy_BKSd.index_copy_(2, places, project(key_states, self.basis, self.proxy_dtype))
        self.proxy_BKSd = self.held_proxy_BKSd
        return super().update(key_states, value_states)

    def take_over(self, layer: StaticLayer) -> None:
        """A layer's buffers, at their addresses, with a proxy of the keys that they hold."""
        own = ("basis", "proxy_dtype", "held_proxy_BKSd", "proxy_BKSd")
        vars(self).update({name: value for name, value in vars(layer).items() if name not in own})
        if self.is_initialized:
            self.held_proxy_BKSd = project(self.keys, self.basis, self.proxy_dtype)

    def offload(self) -> None:
        super().offload()
        if self.held_proxy_BKSd is not None:
            self.held_proxy_BKSd = self.held_proxy_BKSd.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        super().prefetch()
        if self.held_proxy_BKSd is not None:
            self.held_proxy_BKSd = self.held_proxy_BKSd.to(self.device, non_blocking=True)

    def reset(self) -> None:
        super().reset()
        if self.held_proxy_BKSd is not None:
            self.held_proxy_BKSd.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.held_proxy_BKSd is not None:
            self.held_proxy_BKSd = self.held_proxy_BKSd.index_select(0, beam_idx.to(self.held_proxy_BKSd.device))
