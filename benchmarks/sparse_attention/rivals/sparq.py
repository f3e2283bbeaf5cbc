"""SparQ (arXiv 2312.04985): rank the keys by the r channels in which the query is largest."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step, top_mask

MEAN_ELEMENTS = 2
"""Size of a number in the mean of the values, in elements of the cache."""


class SparQ(Rival):
    """Choose the keys with the largest approximate scores, and always the last keys.

    If several query heads share a KV head, the magnitudes of their queries and their scores are summed, as in the
    authors' code. The paper also adds the mean of the values to the output. The authors' code does not do this for such
    models.

    Args:
        k: Number of keys, including the last keys.
        r: Number of channels.
        recent: How many of the last keys are always chosen.
        adds_mean: Whether to add the mean of the values, as in the paper.
    """

    def __init__(self, k: int, r: int, recent: int, adds_mean: bool = False) -> None:
        super().__init__()
        self.k, self.r, self.recent, self.adds_mean = k, r, recent, adds_mean

    def score(self, step: Step) -> Tensor:
        return self._approximate(step).sum(2)

    def _approximate(self, step: Step) -> Tensor:
        """Return the approximate score of each key for each query head, [B, K, G, S]."""
        magnitude_BKD = step.query_BKGD.abs().sum(2)
        channels_BKr = magnitude_BKD.topk(self.r, -1).indices
        query_BKGr = step.query_BKGD.gather(-1, channels_BKr[:, :, None].expand(-1, -1, step.query_BKGD.shape[2], -1))
        key_BKSr = step.key_BKSD.gather(-1, channels_BKr[:, :, None].expand(-1, -1, step.length, -1))
        covered_BKG1 = query_BKGr.abs().sum(-1, keepdim=True) / step.query_BKGD.abs().sum(-1, keepdim=True)
        temperature_BKG1 = (covered_BKG1 * step.head_dim).sqrt()
        return torch.matmul(query_BKGr, key_BKSr.transpose(-1, -2)) / temperature_BKG1

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        worth_BKS = worth_BKS.clone()
        worth_BKS[..., -self.recent :] = float("inf")
        return top_mask(worth_BKS, self.k)

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        out_BKGD = super().attend(step, chosen_BKS)
        if not self.adds_mean:
            return out_BKGD
        weights_BKGS = torch.softmax(self._approximate(step), -1)
        share_BKG1 = (weights_BKGS * chosen_BKS[:, :, None]).sum(-1, keepdim=True)
        return share_BKG1 * out_BKGD + (1 - share_BKG1) * step.value_BKSD.mean(2)[:, :, None]

    def scoring_elements(self, step: Step) -> float:
        return self.r * step.length + self.adds_mean * MEAN_ELEMENTS * step.head_dim
