"""Compute rates, means, and AUCs with 95 % confidence intervals. Random draws have a fixed seed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

RESAMPLES = 1000

Interval = tuple[float, float]


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of the rate ``successes`` / ``trials`` (Wilson 1927), or [0, 1] if there are no
    trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, z2 = successes / trials, Z * Z
    middle = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z / (1 + z2 / trials) * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials))
    return 0.0 if successes == 0 else middle - half, 1.0 if successes == trials else middle + half


def difference(successes: int, trials: int, other_successes: int, other_trials: int) -> Interval:
    """Return the 95 % interval of the difference between two independent rates (Newcombe 1998, method 10).

    Args:
        successes: Number of successes for the first rate.
        trials: Number of trials for the first rate.
        other_successes: Number of successes for the second rate, which is subtracted.
        other_trials: Number of trials for the second rate.
    """
    rate, other = successes / trials, other_successes / other_trials
    (low, high), (other_low, other_high) = wilson(successes, trials), wilson(other_successes, other_trials)
    below = math.sqrt((rate - low) ** 2 + (other_high - other) ** 2)
    above = math.sqrt((high - rate) ** 2 + (other - other_low) ** 2)
    return rate - other - below, rate - other + above


def bootstrap(statistic: Callable[..., float], *samples: NDArray[Any]) -> Interval:
    """Return the 95 % interval of a statistic that is computed from one or more samples (percentile bootstrap). The
    rows of each sample are drawn again, with replacement."""
    generator, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        found.append(statistic(*(rows[generator.integers(0, len(rows), len(rows))] for rows in samples)))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def mean_with_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of some values and its 95 % bootstrap interval, as JSON values."""
    array = np.array(values, dtype=np.float64)
    return {"mean": float(array.mean()), "ci": list(bootstrap(lambda rows: float(rows.mean()), array))}


def pooled_ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the sum of all numerators divided by the sum of all denominators, with its 95 % interval, as JSON values.
    Each pair is (numerator, denominator), and the bootstrap draws whole pairs."""

    def ratio(rows: NDArray[Any]) -> float:
        return float(rows[:, 0].sum() / rows[:, 1].sum())

    array = np.array(pairs)
    return {"mean": ratio(array), "ci": list(bootstrap(ratio, array))}


def auc(members: NDArray[np.float64], controls: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve: the probability that a random member has a higher score than a random
    control. A tie counts as one half."""
    ordered = np.sort(controls)
    below = np.searchsorted(ordered, members, side="left")
    not_above = np.searchsorted(ordered, members, side="right")
    return float((below + not_above).mean() / (2 * len(controls)))


def auc_interval(members: NDArray[np.float64], controls: NDArray[np.float64]) -> Interval:
    """Return the 95 % bootstrap interval of the AUC. Members and controls are drawn separately.

    If the scores separate members and controls perfectly, every draw has an AUC of 1 (or 0). This is one end of the
    interval. The rule of three gives the other end, 1 - 3/n (or 3/n), where n is the size of the smaller group.
    """
    low, high = bootstrap(auc, members, controls)
    slack = 3 / min(len(members), len(controls))
    return (max(0.0, 1 - slack) if low == 1.0 else low), (min(1.0, slack) if high == 0.0 else high)


def true_positive_rate(members: NDArray[np.float64], controls: NDArray[np.float64], one_in: int) -> float | None:
    """Return the true-positive rate at a false-positive rate of at most 1/``one_in``. Return None if there are fewer
    than ``one_in`` controls."""
    allowed = len(controls) // one_in
    if not allowed:
        return None
    threshold = np.sort(controls)[::-1][allowed]
    return float((members > threshold).mean())
