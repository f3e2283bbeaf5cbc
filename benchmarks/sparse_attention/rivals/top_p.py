"""Top-p: by the scores of another method, choose the fewest keys that together get a share p of the attention.

The number of keys then differs between heads, layers, and steps. ``threshold_for`` finds the p with which a given
number of keys is read on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Prompt, Rival, Step


class TopP(Rival):
    """Choose the keys with the highest scores of ``scorer``, until they have a share p of the sum of all scores.

    Args:
        scorer: A method whose scores are softmaxes, summed over the query heads that share a KV head.
        p: Share of the sum of the scores.
        cap: Largest number of keys to choose. None sets no limit.
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
        # Choose a key if the keys with higher scores have less than the share p.
        before_BKS = sorted_BKS.cumsum(-1) - sorted_BKS
        is_kept_BKS = before_BKS < self.p * worth_BKS.sum(-1, keepdim=True)
        if self.cap is not None:
            is_kept_BKS[..., self.cap :] = False
        return torch.zeros_like(is_kept_BKS).scatter_(-1, order_BKS, is_kept_BKS)

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        return self.scorer.attend(step, chosen_BKS)


class ScoreRecorder(Rival):
    """Attend to all keys, and record which shares of the scores top-p would compare with p."""

    def __init__(self, scorer: Rival) -> None:
        super().__init__()
        self.scorer = scorer
        self.before: list[Tensor] = []
        """For each step and layer, a tensor [rows, S]. In each row, the keys are in order of decreasing score. The
        entry of a key is the share of the row's total score that the keys before it have."""

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
        before: The attribute ``before`` of a ``ScoreRecorder``.
        keys: Average number of keys.
        cap: Largest number of keys that are chosen in one step.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        counts = torch.cat([(each[:, :cap] < p).sum(-1) for each in before]).double()
        low, high = (p, high) if counts.mean() <= keys else (low, p)
    return low
