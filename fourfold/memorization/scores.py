"""Score every token in one forward pass over the true text. Membership inference needs only these scores, and so does
extraction at any position.

Greedy decoding after a prefix of the document reproduces the next n tokens if each of them is the most likely token,
given the true tokens before it. So one forward pass gives the answer for every prefix and every suffix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIELDS = ("log_prob", "predicted", "mean", "variance", "sampled")


@dataclass(frozen=True)
class AttackSampling:
    """An attacker's sampling scheme."""

    temperature: float = 1.0
    top_k: int | None = None
    """Draw only from the k most likely tokens."""
    top_p: float | None = None
    """Draw only from the most likely tokens that together have this probability."""

    @property
    def is_plain(self) -> bool:
        return self.temperature == 1.0 and self.top_k is None and self.top_p in (None, 1.0)


@dataclass(frozen=True)
class TokenScores:
    """Scores of one document of T tokens. Every field is [T - 1], for the tokens after the first."""

    tokens: NDArray[np.int64]
    """Token ids of the document [T]."""
    log_prob: NDArray[np.float64]
    """ln p of the token, in nats."""
    predicted: NDArray[np.int64]
    """The most likely token."""
    mean: NDArray[np.float64]
    """Mean of ln p at this position, over the model's distribution."""
    variance: NDArray[np.float64]
    """Variance of ln p at this position, over the model's distribution."""
    sampled: NDArray[np.float64]
    """ln p of the token under the sampling scheme."""

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Return for each token whether greedy decoding produces it, given the true tokens before it."""
        agrees: NDArray[np.bool_] = self.predicted == self.tokens[1:]
        return agrees

    @classmethod
    def of(cls, tokens: NDArray[np.int64], fields: NDArray[np.float32]) -> TokenScores:
        """Convert the fields [5, T - 1] of ``score_logits``."""
        log_prob, predicted, mean, variance, sampled = fields.astype(np.float64)
        return cls(tokens, log_prob, predicted.astype(np.int64), mean, variance, sampled)


def score_logits(logits_mV: Tensor, targets_m: Tensor, sampling: AttackSampling) -> Tensor:
    """Return the scores of m tokens in float32, [5, m]: a row for each name in ``FIELDS``. The logits may be
    overwritten.

    The row ``predicted`` has token ids, which float32 represents exactly up to 2^24.
    """
    logits_mV = logits_mV.float()
    sampled_m = None if sampling.is_plain else _sampled(logits_mV, targets_m, sampling)
    largest_m, predicted_m = logits_mV.max(1)
    logits_mV -= largest_m[:, None]
    target_m = logits_mV.gather(1, targets_m[:, None])[:, 0]
    weights_mV = logits_mV.exp()
    total_m = weights_mV.sum(1)
    mean_m = torch.linalg.vecdot(weights_mV, logits_mV) / total_m
    variance_m = torch.linalg.vecdot(weights_mV, logits_mV.sub_(mean_m[:, None]).square_()) / total_m
    normalizer_m = total_m.log()
    log_prob_m = target_m - normalizer_m
    sampled_m = log_prob_m if sampled_m is None else sampled_m
    return torch.stack([log_prob_m, predicted_m.float(), mean_m - normalizer_m, variance_m, sampled_m])


def likely_tokens(logits_mV: Tensor, targets_m: Tensor, sampling: AttackSampling, count: int) -> Tensor:
    """Return the most likely tokens in float32, [2 * count, m]: their ids, and then ln p of each under the sampling
    scheme. The targets are not used.

    ln p is -inf for tokens that top-k or top-p excludes. ``count`` is at most V.
    """
    scaled_mV = logits_mV.float() / sampling.temperature
    top_mK, ids_mK = scaled_mV.topk(count, dim=1)
    kept_mV = _kept(scaled_mV, sampling)
    log_p_mK = (top_mK - kept_mV.logsumexp(1, keepdim=True)).masked_fill(top_mK < _smallest(kept_mV), -math.inf)
    return torch.cat([ids_mK.float(), log_p_mK], dim=1).T


def _sampled(logits_mV: Tensor, targets_m: Tensor, sampling: AttackSampling) -> Tensor:
    """Return ln p of the targets after temperature, top-k, and top-p, in this order. It is -inf for tokens that top-k
    or top-p excludes."""
    scaled_mV = logits_mV / sampling.temperature
    target_m1 = scaled_mV.gather(1, targets_m[:, None])
    kept_mV = _kept(scaled_mV, sampling)
    log_p_m1 = target_m1 - kept_mV.logsumexp(1, keepdim=True)
    return log_p_m1.masked_fill(target_m1 < _smallest(kept_mV), -math.inf)[:, 0]


def _kept(scaled_mV: Tensor, sampling: AttackSampling) -> Tensor:
    """Return the scaled logits that an attacker draws from. With top-k or top-p, they are in descending order, and
    excluded logits are left out or -inf."""
    if sampling.top_k is None and sampling.top_p is None:
        return scaled_mV
    columns = scaled_mV.shape[1]
    kept_mK = scaled_mV.topk(min(sampling.top_k or columns, columns), dim=1).values  # topk sorts in descending order.
    if sampling.top_p is None:
        return kept_mK
    share_mK = kept_mK.softmax(1)
    before_mK = share_mK.cumsum(1) - share_mK
    return kept_mK.masked_fill(before_mK >= sampling.top_p, -math.inf)


def _smallest(kept_mV: Tensor) -> Tensor:
    """Return the smallest finite logit of each row, [m, 1]."""
    return kept_mV.masked_fill(kept_mV == -math.inf, math.inf).amin(1, keepdim=True)
