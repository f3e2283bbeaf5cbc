"""Count the bytes that torch's operations read from a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.inference.loki.codes import PER_BYTE

aten = torch.ops.aten
_ROWS = {
    aten.index_select.default,
    aten.index_select.out,
    aten.gather.default,
    aten.index.Tensor,
    aten.embedding.default,
}
"""Operations that return some rows of their first argument, and read only these rows."""

_WRITES = {aten.copy_.default, aten.index_copy_.default}
"""Operations that write to their first argument and do not read it."""


class CacheTraffic(TorchDispatchMode):
    """Count in ``bytes_read`` how many bytes torch's operations read from the tensors of ``cache`` inside this context.

    Views read nothing. Operations that select rows read only the selected rows. All other operations read all elements
    of their arguments. Kernels that do not belong to torch are not counted.
    """

    def __init__(self, cache: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.bytes_read = 0
        self._spans = [_span(tensor) for tensor in cache]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address and the end address of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def floor_bytes(length: int, head_dim: int, d: int, k: int, heads: int, itemsize: int) -> int:
    """Return the smallest number of bytes that a decoding step of Loki can read for one sequence: the codes of every
    key, and all dims of k keys and values.

    Args:
        length: Number of tokens in the cache.
        head_dim: Size of a head.
        d: Number of ranking components.
        k: Number of keys that the step attends to.
        heads: Number of KV heads.
        itemsize: Number of bytes per number in the cache.
    """
    return heads * (length * math.ceil(d / PER_BYTE) + 2 * k * head_dim * itemsize)


def dense_bytes(length: int, head_dim: int, heads: int, itemsize: int) -> int:
    """Return the number of bytes that dense attention reads for one sequence: all keys and values."""
    return heads * itemsize * 2 * length * head_dim
