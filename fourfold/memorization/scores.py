"""Score every token in one forward pass over the true text. Membership inference needs only these scores. Measuring
extraction after any prefix of the document also needs only these scores.

Greedy decoding after a prefix of the document reproduces the next n tokens if each of them is the most likely token,
given the true tokens before it. So one forward pass shows for every prefix which tokens greedy decoding reproduces.
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
    """How an attacker draws tokens from the model at random."""

    temperature: float = 1.0
    top_k: int | None = None
    """Draw only from this many of the most likely tokens. None sets no limit."""
    top_p: float | None = None
    """Draw only from the most likely tokens that together have this probability. None sets no limit."""

    @property
    def is_plain(self) -> bool:
        return self.temperature == 1.0 and self.top_k is None and self.top_p in (None, 1.0)


@dataclass(frozen=True)
class TokenScores:
    """Scores of one document of T tokens. Every field except ``tokens`` is [T - 1], for the tokens after the first."""

    tokens: NDArray[np.int64]
    """Token ids of the document [T]."""
    log_prob: NDArray[np.float64]
    """ln p of the token, in nats."""
    predicted: NDArray[np.int64]
    """Id of the most likely token at this position."""
    mean: NDArray[np.float64]
    """Mean of ln p over the model's distribution of the token at this position."""
    variance: NDArray[np.float64]
    """Variance of ln p over the model's distribution of the token at this position."""
    sampled: NDArray[np.float64]
    """ln p of the token if an attacker draws it with the sampling scheme."""

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Return for each token whether greedy decoding produces it, given the true tokens before it."""
        agrees: NDArray[np.bool_] = self.predicted == self.tokens[1:]
        return agrees

    @classmethod
    def of(cls, tokens: NDArray[np.int64], fields: NDArray[np.float32]) -> TokenScores:
        """Create the scores of a document from its tokens [T] and from the result [5, T - 1] of ``score_logits``."""
        log_prob, predicted, mean, variance, sampled = fields.astype(np.float64)
        return cls(tokens, log_prob, predicted.astype(np.int64), mean, variance, sampled)


def score_logits(logits_mV: Tensor, targets_m: Tensor, sampling: AttackSampling) -> Tensor:
    """Return the scores of m tokens in float32, [5, m], with one row for each name in ``FIELDS``.

    The row ``predicted`` has token ids, which float32 represents exactly up to 2^24.

    Args:
        logits_mV: The logits before each token. The function may overwrite them.
        targets_m: The ids of the tokens to score.
        sampling: The attacker's sampling scheme, for the row ``sampled``.
    """
    logits_mV = logits_mV.float()
    sampled_m = None
    if not sampling.is_plain:
        scaled_mV = logits_mV / sampling.temperature
        sampled_m = _log_p(scaled_mV.gather(1, targets_m[:, None]), scaled_mV, sampling)[:, 0]
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
    """Return the most likely tokens at each of m positions, in float32, [2 * count, m]. The first ``count`` rows have
    their ids. The other rows have ln p of these tokens under the sampling scheme.

    ln p is -inf for tokens that top-k or top-p excludes.

    Args:
        logits_mV: The logits at each position.
        targets_m: Not used. The argument is there because every ``scorers.Fields`` function has it.
        sampling: The sampling scheme.
        count: Number of tokens to return, at most V.
    """
    scaled_mV = logits_mV.float() / sampling.temperature
    top_mK, ids_mK = scaled_mV.topk(count, dim=1)
    return torch.cat([ids_mK.float(), _log_p(top_mK, scaled_mV, sampling)], dim=1).T


def _log_p(scaled_mN: Tensor, scaled_mV: Tensor, sampling: AttackSampling) -> Tensor:
    """Return ln p of N tokens at each of m positions, [m, N], under a sampling scheme that applies top-k and then
    top-p. ln p is -inf for tokens that top-k or top-p excludes.

    Args:
        scaled_mN: The tokens' logits, divided by the temperature.
        scaled_mV: The logits of all tokens, divided by the temperature.
        sampling: The sampling scheme.
    """
    if sampling.top_k is None and sampling.top_p is None:
        return scaled_mN - scaled_mV.logsumexp(1, keepdim=True)
    columns = scaled_mV.shape[1]
    kept_mK = scaled_mV.topk(min(sampling.top_k or columns, columns), dim=1).values  # topk sorts in descending order.
    if sampling.top_p is not None:
        share_mK = kept_mK.softmax(1)
        before_mK = share_mK.cumsum(1) - share_mK
        kept_mK = kept_mK.masked_fill(before_mK >= sampling.top_p, -math.inf)
    smallest_m1 = kept_mK.masked_fill(kept_mK == -math.inf, math.inf).amin(1, keepdim=True)
    return (scaled_mN - kept_mK.logsumexp(1, keepdim=True)).masked_fill(scaled_mN < smallest_m1, -math.inf)
