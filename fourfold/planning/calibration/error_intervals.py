"""Intervals of predicted step times, from the errors on sources that no constant was fitted to.

An interval is a pair of factors on the predicted seconds: the 5th and the 95th percentile of measured over predicted.
Every source weighs the same, as the next program is a new source and not a new row. There are two kinds of
extrapolation: to a new program on a machine with fitted rows, and to a new program on a machine without any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from fourfold.planning.calibration.score import Scored, sweeps_in

KINDS = ("known machine", "new machine")
LOW, HIGH = 0.05, 0.95


def interval_of(scored: Sequence[Scored]) -> tuple[float, float]:
    """The 5th and 95th percentile of measured over predicted seconds, with equal weight for every source."""
    timed = [s for s in scored if s.row.seconds is not None]
    sources = Counter(s.row.source for s in timed)
    ratios = [s.row.seconds / s.seconds for s in timed if s.row.seconds is not None]
    low, high = _percentiles(ratios, [1 / sources[s.row.source] for s in timed], [LOW, HIGH])
    return low, high


def coverage(scored: Sequence[Scored]) -> dict[str, float]:
    """The share of each source's rows that are inside the interval of all other sources."""
    shares = {}
    for source in dict.fromkeys(s.row.source for s in scored):
        low, high = interval_of([s for s in scored if s.row.source != source])
        own = [s.row.seconds / s.seconds for s in scored if s.row.source == source and s.row.seconds is not None]
        shares[source] = float(np.mean([low <= ratio <= high for ratio in own]))
    return shares


def order_factor(scored: Sequence[Scored]) -> float:
    """The ratio of the predicted times of two layouts from which the measured ones have the same order (95 %).

    From all pairs of rows that differ only in layout: the 90th percentile of the ratio of their errors, in either
    direction, with equal weight for every source, and in it for every sweep.
    """
    sweeps = [sweep for sweep in sweeps_in(scored) if len(sweep) > 1]
    of_source = Counter(sweep[0].row.source for sweep in sweeps)
    apart, weights = [], []
    for sweep in sweeps:
        errors = np.log([s.seconds / s.row.seconds for s in sweep if s.row.seconds is not None])
        pairs = [abs(one - other) for one, other in combinations(errors, 2)]
        apart += pairs
        weights += [1 / (len(pairs) * of_source[sweep[0].row.source])] * len(pairs)
    return float(np.exp(_percentiles(apart, weights, [HIGH - LOW])[0]))


def _percentiles(values: Sequence[float], weights: Sequence[float], shares: Sequence[float]) -> list[float]:
    order, each = np.argsort(values), np.array(weights)
    middle = np.cumsum(each[order]) - each[order] / 2
    return [float(p) for p in np.interp(shares, middle / each.sum(), np.array(values)[order])]
