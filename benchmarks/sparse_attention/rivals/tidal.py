"""TidalDecode (arXiv 2410.05076): one layer attends to all keys, and chooses the keys for all later layers."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step, scores_of, top_mask
from fourfold.inference.loki.select import combine_heads


class TidalDecode(Rival):
    """Choose keys in one layer, by exact scores. All later layers attend to these keys. Earlier layers are dense.

    Args:
        k: Number of keys.
        layer: The layer that chooses, counted from 0. It attends to all keys, as in the authors' code.
    """

    def __init__(self, k: int, layer: int) -> None:
        super().__init__()
        self.k, self.layer = k, layer
        self.chosen_BKS = torch.empty(0)

    def score(self, step: Step) -> Tensor | None:
        return combine_heads(scores_of(step)) if step.layer == self.layer else None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        if worth_BKS is not None:
            self.chosen_BKS = top_mask(worth_BKS, self.k)
        if step.layer <= self.layer:
            return torch.ones(step.key_BKSD.shape[:3], dtype=torch.bool)
        return self.chosen_BKS
