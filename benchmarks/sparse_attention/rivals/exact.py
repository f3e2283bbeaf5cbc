"""Methods for comparison: choose keys by their exact scores, at random, or choose all keys (dense attention).

A method with exact scores has to read all keys to compute them, but does not count these bytes. So it saves nothing in
practice, and its results are upper bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step, scores_of, top_mask
from fourfold.inference.loki.select import combine_heads


class Dense(Rival):
    """Choose all keys."""

    def score(self, step: Step) -> None:
        return None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        return torch.ones(step.key_BKSD.shape[:3], dtype=torch.bool)


class ExactTopK(Rival):
    """Choose the k keys with the largest exact scores."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def score(self, step: Step) -> Tensor:
        return combine_heads(scores_of(step))

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        return top_mask(worth_BKS, self.k)


class RandomKeys(Rival):
    """Choose k random keys, and always the current token."""

    def __init__(self, k: int, seed: int = 0) -> None:
        super().__init__()
        self.k, self.generator = k, torch.Generator().manual_seed(seed)

    def score(self, step: Step) -> Tensor:
        worth_BKS = torch.rand(step.key_BKSD.shape[:3], generator=self.generator)
        worth_BKS[..., -1] = 2.0
        return worth_BKS

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        return top_mask(worth_BKS, self.k)
