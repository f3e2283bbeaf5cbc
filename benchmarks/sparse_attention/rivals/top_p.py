"""Choose as few keys as hold a share p of the attention (top-p), by the scores of any other method.

The number of keys then differs between heads, layers, and steps. ``threshold_for`` finds the p that reads a given
number of keys on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Prompt, Rival, Step


class TopP(Rival):
    """Choose the best keys of ``scorer`` until they hold a share p of its softmax, but at most ``cap`` keys.

    Args:
        scorer: Its scores are the sum of the softmaxes over the heads of a group.
        p: Share of the softmax.
        cap: Largest number of keys. None sets no limit.
    """

    def __init__(self, scorer: Rival, p: float, cap: int | None = None) -> None:
        super().__init__()
        self.scorer, self.p, self.cap = scorer, p, cap

    def start(self, prompts: Sequence[Prompt]) -> None:
        super().start(prompts)
        self.scorer.start(prompts)

    def score(self, step: Step) -> Tensor | None:
        return self.scorer.score(step)

    def scoring_elements(self, step: Step) -> float:
        return self.scorer.scoring_elements(step)

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        sorted_BKS, order_BKS = worth_BKS.sort(-1, descending=True)
        # Keep a key if the keys with larger weights add up to less than p.
        before_BKS = sorted_BKS.cumsum(-1) - sorted_BKS
        is_kept_BKS = before_BKS < self.p * worth_BKS.sum(-1, keepdim=True)
        if self.cap is not None:
            is_kept_BKS[..., self.cap :] = False
        return torch.zeros_like(is_kept_BKS).scatter_(-1, order_BKS, is_kept_BKS)


class ScoreRecorder(Rival):
    """Attend to all keys, and record how fast the sorted scores of another method add up."""

    def __init__(self, scorer: Rival) -> None:
        super().__init__()
        self.scorer = scorer
        self.before: list[Tensor] = []
        """For each step and layer, the share of the softmax before each sorted key, [rows, S]."""

    def start(self, prompts: Sequence[Prompt]) -> None:
        super().start(prompts)
        self.scorer.start(prompts)

    def score(self, step: Step) -> Tensor | None:
        worth_BKS = self.scorer.score(step)
        assert worth_BKS is not None
        shares_RS = (worth_BKS / worth_BKS.sum(-1, keepdim=True)).flatten(0, 1).sort(-1, descending=True).values
        self.before.append(shares_RS.cumsum(-1) - shares_RS)
        return None

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        return torch.ones(step.key_BKSD.shape[:3], dtype=torch.bool)


def threshold_for(before: Sequence[Tensor], keys: float, cap: int | None = None) -> float:
    """Return the largest p for which top-p reads at most ``keys`` keys on average.

    Args:
        before: What a ``ScoreRecorder`` recorded.
        keys: Average number of keys.
        cap: Largest number of keys of one choice.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        counts = torch.cat([(each[:, :cap] < p).sum(-1) for each in before]).double()
        low, high = (p, high) if counts.mean() <= keys else (low, p)
    return low
