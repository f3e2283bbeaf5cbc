"""Counts the bytes that a step reads of its cache: what Loki is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_ROWS = {
    aten.index_select.default,
    aten.index_select.out,
    aten.gather.default,
    aten.index.Tensor,
    aten.embedding.default,
}
"""Read of their first argument as much as they return."""

_WRITES = {aten.copy_.default, aten.index_copy_.default}
"""Only write to their first argument."""


class CacheTraffic(TorchDispatchMode):
    """Inside, every operation of torch that reads memory of ``cache`` adds to ``bytes_read``.

    Operations that only make views read nothing; those that pick rows read these; all others read all that they are
    given. Kernels outside torch are not seen.
    """

    def __init__(self, cache: Sequence[Tensor]) -> None:
        super().__init__()
        self.bytes_read = 0
        self._spans = [_span(tensor) for tensor in cache]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            begin = 1 if func in _WRITES else 0
            for number, argument in enumerate(tree_leaves((args[begin:], kwargs or {}))):
                if isinstance(argument, Tensor) and self._is_cached(argument):
                    picks_rows = func in _ROWS and number == 0
                    self.bytes_read += (out if picks_rows else argument).nbytes
        return out

    def _is_cached(self, tensor: Tensor) -> bool:
        begin, end = _span(tensor)
        return any(first <= begin and end <= last for first, last in self._spans)


def floor_bytes(
    length: int, head_dim: int, d: int, k: int, heads: int, itemsize: int, proxy_itemsize: int | None = None
) -> int:
    """The least that a step can read, of one sequence: every key's d dims, and k keys and values."""
    return heads * (length * d * (proxy_itemsize or itemsize) + 2 * k * head_dim * itemsize)


def dense_bytes(length: int, head_dim: int, heads: int, itemsize: int) -> int:
    """What full attention reads, of one sequence: all keys and values."""
    return heads * itemsize * 2 * length * head_dim


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where the storage of a tensor begins and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
