"""Compute the intervals of predicted step times, from the errors of predictions for sources that are not in the fit.

An interval is a pair of factors: the 5th and the 95th percentile of measured seconds divided by predicted seconds. The
planner multiplies the predicted seconds of a step by these factors.

As in the fit, n rows of a source have the weight of √n rows, because a user's training framework is like a new source,
not like one more row of a known source. A hypothetical source stands for all sources that nobody has published. It
keeps the interval wide for kinds of steps with few sources.

Each kind of step (``machine_constants.kind_of_step``) has two intervals: one for machines with rows in the fit, and one
for new machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from fourfold.planning.calibration.score import Scored, sweeps_in

EXTRAPOLATIONS = ("known machine", "new machine")
KINDS = ("dense", "small batch", "long context", "mixture")
LOW, HIGH = 0.05, 0.95
UNKNOWN = NormalDist(0, 0.35)
"""Distribution of log(measured / predicted) for the hypothetical source. Its standard deviation is similar to the
standard deviations of the sources that the planner predicts worst."""
UNKNOWN_ROWS, UNKNOWN_WEIGHT = 39, 2.0
"""The hypothetical source has this many ratios of measured to predicted seconds. Together, they have as much weight
as a source with 4 rows (√4 = 2)."""
NEAR = 1.35
"""``order_factor`` compares a layout with the best layout if the predicted time is at most this many times as long."""
MIN_COMPARED = 10
"""``order_factor`` ignores a source with fewer compared layouts than this."""


def interval_of(scored: Sequence[Scored]) -> tuple[float, float]:
    """Return the 5th and 95th percentile of measured seconds divided by predicted seconds, over the rows and the
    hypothetical source."""
    timed = [s for s in scored if s.row.seconds is not None]
    sources = Counter(s.row.source for s in timed)
    ratios = [s.row.seconds / s.seconds for s in timed if s.row.seconds is not None]
    weights = [sources[s.row.source] ** -0.5 for s in timed]
    ratios += [float(np.exp(UNKNOWN.inv_cdf((i + 0.5) / UNKNOWN_ROWS))) for i in range(UNKNOWN_ROWS)]
    low, high = _percentiles(ratios, weights + [UNKNOWN_WEIGHT / UNKNOWN_ROWS] * UNKNOWN_ROWS, [LOW, HIGH])
    return low, high


def coverage(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the fraction of each source's rows that are inside the interval. The interval of a source is computed from
    all other sources."""
    shares = {}
    for source in dict.fromkeys(s.row.source for s in scored):
        low, high = interval_of([s for s in scored if s.row.source != source])
        own = [s.row.seconds / s.seconds for s in scored if s.row.source == source and s.row.seconds is not None]
        shares[source] = float(np.mean([low <= ratio <= high for ratio in own]))
    return shares


def order_factor(scored: Sequence[Scored]) -> float:
    """Return how far two predicted times must be apart, as a ratio, so that the measured times have the predicted order
    with a probability of 95 %.

    In each sweep, the layout with the shortest predicted time is compared with every layout whose predicted time is
    close. For each pair, we compute the ratio of the two measured times and the ratio of the two predicted times, and
    the factor between these two ratios. The result is the 90th percentile of these factors. Every source with at least
    ``MIN_COMPARED`` comparisons has the same weight.
    """
    found: dict[str, list[float]] = {}
    for sweep in sweeps_in(scored):
        best = min(sweep, key=lambda s: s.seconds)
        near = [s for s in sweep if s is not best and s.seconds <= NEAR * best.seconds]
        own = found.setdefault(best.row.source, [])
        own += [abs(float(np.log(_slower(s) / _slower(best)))) for s in near]
    found = {source: errors for source, errors in found.items() if len(errors) >= MIN_COMPARED}
    weights = [1 / len(errors) for errors in found.values() for _ in errors]
    apart = [error for errors in found.values() for error in errors]
    return float(np.exp(_percentiles(apart, weights, [HIGH - LOW])[0]))


def _slower(scored: Scored) -> float:
    assert scored.row.seconds is not None
    return scored.row.seconds / scored.seconds


def _percentiles(values: Sequence[float], weights: Sequence[float], shares: Sequence[float]) -> list[float]:
    order, each = np.argsort(values), np.array(weights)
    middle = np.cumsum(each[order]) - each[order] / 2
    return [float(p) for p in np.interp(shares, middle / each.sum(), np.array(values)[order])]
