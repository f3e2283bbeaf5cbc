"""SparQ (arXiv 2312.04985): rank the keys by the r channels in which the query is largest."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step, top_mask


class SparQ(Rival):
    """Choose the keys with the largest approximate scores, and always the last keys.

    If several query heads share a KV head, the magnitudes of their queries and their scores are summed, as in the
    authors' code. The paper also adds the mean of the values to the output. The authors' code does not do this for such
    models, and neither does this class.

    Args:
        k: Number of keys, including the last keys.
        r: Number of channels.
        recent: How many of the last keys are always chosen.
    """

    def __init__(self, k: int, r: int, recent: int) -> None:
        super().__init__()
        self.k, self.r, self.recent = k, r, recent

    def score(self, step: Step) -> Tensor:
        magnitude_BKD = step.query_BKGD.abs().sum(2)
        channels_BKr = magnitude_BKD.topk(self.r, -1).indices
        query_BKGr = step.query_BKGD.gather(-1, channels_BKr[:, :, None].expand(-1, -1, step.query_BKGD.shape[2], -1))
        key_BKSr = step.key_BKSD.gather(-1, channels_BKr[:, :, None].expand(-1, -1, step.length, -1))
        covered_BKG1 = query_BKGr.abs().sum(-1, keepdim=True) / step.query_BKGD.abs().sum(-1, keepdim=True)
        temperature_BKG1 = (covered_BKG1 * step.head_dim).sqrt()
        return (torch.matmul(query_BKGr, key_BKSr.transpose(-1, -2)) / temperature_BKG1).sum(2)

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        worth_BKS = worth_BKS.clone()
        worth_BKS[..., -self.recent :] = float("inf")
        return top_mask(worth_BKS, self.k)

    def scoring_elements(self, step: Step) -> float:
        return self.r * step.length
