"""Quest (arXiv 2406.10774): choose whole pages of the cache by an upper bound on the scores of their keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.sparse_attention.rivals.interface import Rival, Step, top_mask
from fourfold.inference.loki.select import combine_heads


class Quest(Rival):
    """Choose the pages with the largest bounds. A page stores the minimum and the maximum of each channel of its keys.
    Its bound is the sum over the channels of max(q·min, q·max).

    Args:
        pages: Number of pages to choose.
        page_size: Number of tokens of a page (16 in the paper).
    """

    def __init__(self, pages: int, page_size: int = 16) -> None:
        super().__init__()
        self.pages, self.page_size = pages, page_size

    def score(self, step: Step) -> Tensor:
        """Return the bound of each page, combined over the query heads that share a KV head, [B, K, pages]."""
        missing = -step.length % self.page_size
        high_BKPD = pad(step.key_BKSD, (0, 0, 0, missing), value=float("-inf")).unflatten(2, (-1, self.page_size))
        low_BKPD = pad(step.key_BKSD, (0, 0, 0, missing), value=float("inf")).unflatten(2, (-1, self.page_size))
        query_BKGD = step.query_BKGD * step.scaling
        bounds_BKGP = torch.matmul(query_BKGD.clamp(min=0), high_BKPD.amax(3).transpose(-1, -2))
        bounds_BKGP += torch.matmul(query_BKGD.clamp(max=0), low_BKPD.amin(3).transpose(-1, -2))
        return combine_heads(bounds_BKGP)

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        pages_BKP = top_mask(worth_BKS, self.pages)
        return pages_BKP.repeat_interleave(self.page_size, -1)[..., : step.length]

    def scoring_elements(self, step: Step) -> float:
        return 2 * step.head_dim * -(-step.length // self.page_size)
