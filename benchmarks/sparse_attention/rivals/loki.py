"""Loki, computed with the same functions as in ``fourfold generate``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import project
from fourfold.inference.loki.select import always_chosen, choose_keys, combine_heads


class Loki(Rival):
    """Rank the keys by their leading principal components.

    Args:
        bases: For each layer, what ``LokiBasis.of_layer`` returns.
        config: Loki's settings, with ``k``.
    """

    def __init__(self, bases: Sequence[Tensor], config: LokiConfig) -> None:
        super().__init__()
        self.bases, self.config = bases, config

    def score(self, step: Step) -> Tensor:
        of_queries_KDd, of_keys_KDd = self.bases[step.layer]
        query_BKGd = project(step.query_BKGD, of_queries_KDd) * step.scaling
        # An efficient implementation would cache the projected keys. Projecting them in every step gives the same
        # numbers.
        return combine_heads(torch.matmul(query_BKGd, project(step.key_BKSD, of_keys_KDd).transpose(-1, -2)))

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        chosen_BKk = choose_keys(worth_BKS, self.config.key_count(step.length), self.config)
        return torch.zeros_like(worth_BKS, dtype=torch.bool).scatter_(-1, chosen_BKk, True)

    def scoring_elements(self, step: Step) -> float:
        return self.bases[step.layer].shape[-1] * step.length


class LokiSharedBudget(Loki):
    """Loki, but the KV heads of a layer share one budget of keys. Heads that spread their attention over many keys get
    more keys.

    Every head attends at least to the current token, because attention to no key at all is not defined.
    """

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        k = self.config.key_count(step.length)
        kept_S = always_chosen(self.config, k, None, None, step.length, worth_BKS.device)
        if kept_S is not None:
            worth_BKS = worth_BKS.masked_fill(kept_S, float("inf"))
        worth_BKS = torch.cat([worth_BKS[..., :-1], torch.full_like(worth_BKS[..., -1:], float("inf"))], -1)
        best_Bk = worth_BKS.flatten(1).topk(k * worth_BKS.shape[1], -1).indices
        chosen_BKS = torch.zeros_like(worth_BKS, dtype=torch.bool)
        return chosen_BKS.flatten(1).scatter_(-1, best_Bk, True).view_as(chosen_BKS)
