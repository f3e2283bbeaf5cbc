"""Keep a moving average of the weights, sharded like the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fourfold.parallel.state import LocalShard


class WeightAverage:
    """Exponential moving average (EMA) of the trained weights, in float32.

    The average starts with the weights after the first update. Each later update computes average ← decay · average +
    (1 - decay) · weight. Each element has its own average, so the result is the same on every grid.

    Source: Polyak and Juditsky 1992, in the form of Tarvainen and Valpola 2017, arXiv 1703.01780.
    """

    def __init__(self, shards: Sequence[LocalShard], decay: float) -> None:
        self.shards, self.decay = list(shards), decay
        self.averages: list[Tensor] = [torch.zeros_like(shard.local, dtype=torch.float32) for shard in shards]
        """The average of each shard's weights, in the shape of the shard's local tensor."""
        self.has_begun = False

    @torch.no_grad()
    def restart(self) -> None:
        """Start the average with the current weights."""
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.copy_(shard.local)
        self.has_begun = True

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights. The caller does this after each optimizer update."""
        if not self.has_begun:
            self.restart()
            return
        for average, shard in zip(self.averages, self.shards, strict=True):
            average.lerp_(shard.local.float(), 1 - self.decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Replace the weights by their averages while the block runs. The caller must call ``Job.publish`` at the start
        of the block and after the block."""
        with torch.no_grad():
            weights = [shard.local.clone() for shard in self.shards]
            try:
                for average, shard in zip(self.averages, self.shards, strict=True):
                    shard.local.copy_(average)
                yield
            finally:
                for weight, shard in zip(weights, self.shards, strict=True):
                    shard.local.copy_(weight)
