"""A tensor that grows along the sequence without being copied at every token."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 64
DIM = 2


class Plane:
    """[B, K, S, any], which grows along S by doubling; ``capacity``: room at once, where the length is known."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity, self.length = capacity, 0
        self._data: Tensor | None = None

    @property
    def view(self) -> Tensor:
        """What has been appended."""
        assert self._data is not None, "nothing has been appended"
        return self._data.narrow(DIM, 0, self.length)

    @property
    def held_bytes(self) -> int:
        return 0 if self._data is None else self.view.numel() * self._data.element_size()

    def append(self, new: Tensor) -> None:
        """Write behind the last token, into the room that is there or into twice as much."""
        count = new.shape[DIM]
        if self._data is None or self.length + count > self._data.shape[DIM]:
            self._grow(new, self.length + count)
        elif self._data.is_inference() and not torch.is_inference_mode_enabled():
            self._data = self._data.clone()  # what was made in inference mode cannot be written to outside it
        self._data.narrow(DIM, self.length, count).copy_(new)
        self.length += count

    def crop(self, count: int) -> None:
        """Forget the last tokens."""
        self.length = max(0, self.length - count)

    def clear(self) -> None:
        self._data, self.length = None, 0

    def select(self, indices: Tensor) -> None:
        """Keep these sequences of the batch, in this order, and the room to grow."""
        if self._data is not None:
            self._data = self._data[indices.to(self._data.device)]

    def repeat(self, repeats: int) -> None:
        """Every sequence of the batch so many times, side by side."""
        if self._data is not None:
            self._data = self._data.repeat_interleave(repeats, dim=0)

    def to(self, device: torch.device) -> None:
        if self._data is not None:
            self._data = self._data.to(device, non_blocking=True)

    def _grow(self, new: Tensor, needed: int) -> None:
        held = None if self._data is None else self.view
        room = 0 if self._data is None else self._data.shape[DIM]
        shape = list(new.shape)
        shape[DIM] = max(needed, 2 * room, self.capacity, LEAST)
        self._data = new.new_empty(shape)
        if held is not None:
            self._data.narrow(DIM, 0, self.length).copy_(held)
