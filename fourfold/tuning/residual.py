"""Learn from a few trials how wrong the planner's prediction is for every candidate. A Gaussian process models the
logarithm of measured seconds / predicted seconds.

The covariance has three terms:

- A factor that all layouts share.
- An error for each part of the step, such as the communication over the axis x. The weight of this error is the part's
  share of the predicted step. So a trial that mostly communicates over x also corrects the time for x in all other
  layouts.
- A remainder, for effects that the cost model omits. Similar layouts have similar remainders.
"""

from dataclasses import dataclass

import numpy as np

from fourfold.planning.cost.step import PARTS
from fourfold.tuning.candidates import Candidates

COMMON = 0.5
"""Standard deviation of the logarithm of the factor that all layouts share. This factor does not change the order of
the layouts."""
SPREADS = {
    "compute": 0.1, "recompute": 0.1, "x": 0.4, "y": 0.4, "z": 0.4, "cp": 0.4, "ep": 0.4, "dp": 0.4, "pp": 0.5,
    "bubble": 0.3, "logits": 0.2, "launch": 0.5, "optimizer": 0.3, "other": 0.8,
}  # fmt: skip
"""Standard deviation of the logarithm of each part's error. Matmuls have the smallest value, because their rates are
known best. Communication has large values, because it is hard to predict how much of it is hidden."""
REMAINDER, LENGTH = 0.11, 1.0
"""Standard deviation of the remainder (the third term of the covariance), and its correlation length. Lengths are
distances between the points in ``Candidates.features``. Both values maximize the likelihood of 295 published step times
in 44 sweeps. (The runs of a sweep differ only in layout.) Each sweep was predicted with constants that were fitted
without its machine."""
SCALES = np.geomspace(0.5, 8, 25)
"""Possible factors on the standard deviations of the parts and the remainder, relative to ``Candidates.doubt``. The
model uses the factor that the trials make most likely."""
SCALE_SPREAD = 0.35
"""Standard deviation of the factor's logarithm before any trial."""
DRAWS = 2048
"""Number of random draws in ``Posterior.draws``."""
JITTER = 1e-8
"""Added to the diagonal of a covariance matrix, so that it stays positive definite despite rounding."""
assert tuple(SPREADS) == PARTS


@dataclass(frozen=True)
class Posterior:
    """The joint normal distribution of the log seconds of all candidates, given the trials."""

    mean: np.ndarray
    """Expected log seconds [n]."""
    covariance_factor: np.ndarray
    """A matrix M [trials, n]. The covariance is the prior covariance minus MᵀM."""
    candidates: Candidates
    scale: float
    """The most likely factor on the standard deviations of the parts and the remainder (see ``SCALES``)."""

    def covariance(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the posterior covariance of log seconds between each candidate in ``one`` and each candidate in
        ``other``, [one, other]. Both are arrays of indices."""
        prior = prior_covariance(self.candidates, one, other, self.scale)
        return np.asarray(prior - self.covariance_factor[:, one].T @ self.covariance_factor[:, other])

    def spread_against(self, incumbent: int) -> np.ndarray:
        """Return the standard deviation of each candidate's log seconds minus the incumbent's log seconds, [n]."""
        everyone, best = np.arange(self.candidates.count), np.array([incumbent])
        own = prior_variance(self.candidates, self.scale) - (self.covariance_factor**2).sum(axis=0)
        shared = self.covariance(everyone, best)[:, 0]
        return np.asarray(np.sqrt(np.maximum(own + self.covariance(best, best)[0, 0] - 2 * shared, 0)))

    def draws(self, index: np.ndarray, seed: int) -> np.ndarray:
        """Return random joint draws of the log seconds of the candidates in ``index`` [draws, index]."""
        covariance = self.covariance(index, index) + JITTER * np.eye(len(index))
        normal = np.random.default_rng(seed).standard_normal((DRAWS, len(index)))
        return np.asarray(self.mean[index] + normal @ np.linalg.cholesky(covariance).T)


def prior_covariance(candidates: Candidates, one: np.ndarray, other: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Return the prior covariance of log(measured / predicted) between each candidate in ``one`` and each candidate in
    ``other``, [one, other]. Both are arrays of indices."""
    weights = np.array(list(SPREADS.values())) ** 2
    parts = (candidates.shares[one] * weights) @ candidates.shares[other].T
    a, b = candidates.features[one] / LENGTH, candidates.features[other] / LENGTH
    distance = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    return np.asarray(COMMON**2 + scale**2 * (parts + REMAINDER**2 * np.exp(-np.maximum(distance, 0) / 2)))


def prior_variance(candidates: Candidates, scale: float = 1.0) -> np.ndarray:
    """Return the diagonal of ``prior_covariance`` [n]."""
    weights = np.array(list(SPREADS.values())) ** 2
    return np.asarray(COMMON**2 + scale**2 * (candidates.shares**2 @ weights + REMAINDER**2))


def posterior(candidates: Candidates, index: np.ndarray, seconds: np.ndarray, noise: np.ndarray) -> Posterior:
    """Return the posterior, given the step times of trials.

    Args:
        candidates: The candidates.
        index: The index of each trial's candidate.
        seconds: The measured step time of each trial in seconds.
        noise: The standard deviation of the logarithm of each measured step time.
    """
    ratio = np.log(seconds) - np.log(candidates.seconds[index])
    scale = _likeliest_scale(candidates, index, ratio, noise)
    lower = np.linalg.cholesky(prior_covariance(candidates, index, index, scale) + np.diag(noise**2))
    to_all = prior_covariance(candidates, index, np.arange(candidates.count), scale)
    factor = np.linalg.solve(lower, to_all)
    mean = np.log(candidates.seconds) + factor.T @ np.linalg.solve(lower, ratio)
    return Posterior(np.asarray(mean), factor, candidates, scale)


def _likeliest_scale(candidates: Candidates, index: np.ndarray, ratio: np.ndarray, noise: np.ndarray) -> float:
    """Return the most likely factor on the standard deviations of the parts and the remainder (see ``SCALES``), given
    the trials and the factor's prior."""
    usual = candidates.doubt
    one, both = prior_covariance(candidates, index, index, 0.0), prior_covariance(candidates, index, index, 1.0)
    best, found = -np.inf, usual
    for scale in usual * SCALES:
        lower = np.linalg.cholesky(one + scale**2 * (both - one) + np.diag(noise**2))
        whitened = np.linalg.solve(lower, ratio)
        penalty = (np.log(scale / usual) / SCALE_SPREAD) ** 2
        log = -(whitened @ whitened) / 2 - np.log(lower.diagonal()).sum() - penalty / 2
        if log > best:
            best, found = log, float(scale)
    return found
