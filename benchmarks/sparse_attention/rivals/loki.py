"""Loki, computed with the same functions as in ``fourfold generate``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.sparse_attention.rivals.interface import Rival, Step, scores_of, weights_of
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.codes import PER_BYTE, Encoder, decoded
from fourfold.inference.loki.rest import share_of_chosen
from fourfold.inference.loki.select import always_chosen, choose_keys, combine_heads

ELEMENT_BYTES = 2
"""Size of an element of the cache."""
SUM_ELEMENTS = 2
"""Size of a number in the sum of the values, in elements of the cache."""


class Loki(Rival):
    """Rank the keys by codes of their leading components.

    Args:
        encoders: For each layer, what ``LokiBasis.of_layer`` returns.
        config: Loki's settings, with ``k``.
    """

    def __init__(self, encoders: Sequence[Encoder], config: LokiConfig) -> None:
        super().__init__()
        self.encoders, self.config = encoders, config

    def score(self, step: Step) -> Tensor:
        return combine_heads(self._coded(step))

    def _coded(self, step: Step) -> Tensor:
        """Return the scores of the codes, [B, K, G, S]."""
        encoder = self.encoders[step.layer]
        query_BKGd = encoder.project_queries(step.query_BKGD) * step.scaling
        # fourfold caches the codes. Computing them in every step gives the same numbers.
        code_BKSd = decoded(encoder.encode(step.key_BKSD), query_BKGd.dtype)
        return torch.matmul(query_BKGd, code_BKSd.transpose(-1, -2))

    def select(self, step: Step, worth_BKS: Tensor | None) -> Tensor:
        assert worth_BKS is not None
        chosen_BKk = choose_keys(worth_BKS, self.config.key_count(step.length), self.config)
        return torch.zeros_like(worth_BKS, dtype=torch.bool).scatter_(-1, chosen_BKk, True)

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        """Attend to the chosen keys, and to the mean of all other keys."""
        chosen_BK1S, coded_BKGS = chosen_BKS[:, :, None], self._coded(step)
        share_BKG1, _ = share_of_chosen(scores_of(step), coded_BKGS, chosen_BK1S, coded_BKGS, ~chosen_BK1S)
        rest_BK1S = ~chosen_BK1S / (~chosen_BK1S).sum(-1, keepdim=True).clamp(min=1)
        weights_BKGS = share_BKG1 * weights_of(step, chosen_BKS) + (1 - share_BKG1) * rest_BK1S
        return torch.matmul(weights_BKGS, step.value_BKSD)

    def scoring_elements(self, step: Step) -> float:
        of_codes = self.encoders[step.layer].keys_KDd.shape[-1] / PER_BYTE / ELEMENT_BYTES * step.length
        return of_codes + SUM_ELEMENTS * step.head_dim


class PaperLoki(Loki):
    """Loki as in the paper: the components are not coded.

    Args:
        sides: For each layer, what ``Components.sides`` returns.
        config: Loki's settings, with ``k``.
    """

    def __init__(self, sides: Sequence[Tensor], config: LokiConfig) -> None:
        super().__init__((), config)
        self.sides = sides

    def score(self, step: Step) -> Tensor:
        of_queries_KDd, of_keys_KDd = self.sides[step.layer]
        key_BKSd = torch.matmul(step.key_BKSD, of_keys_KDd)
        query_BKGd = torch.matmul(step.query_BKGD, of_queries_KDd) * step.scaling
        return combine_heads(torch.matmul(query_BKGd, key_BKSd.transpose(-1, -2)))

    def attend(self, step: Step, chosen_BKS: Tensor) -> Tensor:
        return Rival.attend(self, step, chosen_BKS)

    def scoring_elements(self, step: Step) -> float:
        return self.sides[step.layer].shape[-1] * step.length


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
