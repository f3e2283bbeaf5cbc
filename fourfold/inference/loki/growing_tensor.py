"""Define a tensor that grows along its sequence dim without copying all tokens for each new token."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_CAPACITY = 64
SEQUENCE_DIM = 2


class GrowingTensor:
    """A tensor [B, K, S, …] that grows along S by doubling its storage."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        """Number of tokens to allocate memory for at the start. 0 if the final length is not known."""

        self.length = 0
        """Number of tokens that have been appended."""

        self.storage: Tensor | None = None
        """The tokens, followed by unused memory."""

    @property
    def filled(self) -> Tensor:
        """Return a view of the tokens that have been appended."""
        assert self.storage is not None, "nothing has been appended"
        return self.storage.narrow(SEQUENCE_DIM, 0, self.length)

    @property
    def held_bytes(self) -> int:
        return 0 if self.storage is None else self.filled.nbytes

    def append(self, new: Tensor) -> None:
        """Append tokens after the last token. The storage doubles when it is full."""
        count = new.shape[SEQUENCE_DIM]
        storage = self.storage
        if storage is None or self.length + count > storage.shape[SEQUENCE_DIM]:
            storage = self._grown(new, self.length + count)
        elif storage.is_inference() and not torch.is_inference_mode_enabled():
            # A tensor that was created in inference mode cannot be changed outside of inference mode.
            storage = storage.clone()
        storage.narrow(SEQUENCE_DIM, self.length, count).copy_(new)
        self.storage = storage
        self.length += count

    def crop(self, count: int) -> None:
        """Drop the last ``count`` tokens."""
        self.length = max(0, self.length - count)

    def clear(self) -> None:
        self.storage, self.length = None, 0

    def select(self, indices: Tensor) -> None:
        """Keep only the sequences of the batch with these indices, in the given order. Keep the unused memory too."""
        if self.storage is not None:
            self.storage = self.storage[indices.to(self.storage.device)]

    def repeat(self, repeats: int) -> None:
        """Replace every sequence of the batch by ``repeats`` copies. Copies of a sequence are next to each other."""
        if self.storage is not None:
            self.storage = self.storage.repeat_interleave(repeats, dim=0)

    def to(self, device: torch.device) -> None:
        if self.storage is not None:
            self.storage = self.storage.to(device, non_blocking=True)

    def _grown(self, new: Tensor, needed: int) -> Tensor:
        """Return larger storage that begins with the current tokens."""
        allocated = 0 if self.storage is None else self.storage.shape[SEQUENCE_DIM]
        shape = list(new.shape)
        shape[SEQUENCE_DIM] = max(needed, 2 * allocated, self.capacity, MIN_CAPACITY)
        storage = new.new_empty(shape)
        if self.storage is not None:
            storage.narrow(SEQUENCE_DIM, 0, self.length).copy_(self.filled)
        return storage
