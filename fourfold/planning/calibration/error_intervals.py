"""Intervals of predicted step times, from the errors on sources that no constant was fitted to.

An interval is a pair of factors on the predicted seconds: the 5th and the 95th percentile of measured over predicted.
Every source weighs the same, as the next program is a new source and not a new row. There are two kinds of
extrapolation: to a new program on a machine with fitted rows, and to a new program on a machine without any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.planning.calibration.score import Scored

KINDS = ("known machine", "new machine")
LOW, HIGH = 0.05, 0.95


def interval_of(scored: Sequence[Scored]) -> tuple[float, float]:
    """The 5th and 95th percentile of measured over predicted seconds, with equal weight for every source."""
    ratios = np.array([s.row.seconds / s.seconds for s in scored if s.row.seconds is not None])
    sources = [s.row.source for s in scored if s.row.seconds is not None]
    weights = np.array([1 / sources.count(source) for source in sources])
    order = np.argsort(ratios)
    middle = np.cumsum(weights[order]) - weights[order] / 2
    low, high = np.interp([LOW, HIGH], middle / weights.sum(), ratios[order])
    return float(low), float(high)


def coverage(scored: Sequence[Scored]) -> dict[str, float]:
    """The share of each source's rows that are inside the interval of all other sources."""
    shares = {}
    for source in dict.fromkeys(s.row.source for s in scored):
        low, high = interval_of([s for s in scored if s.row.source != source])
        own = [s.row.seconds / s.seconds for s in scored if s.row.source == source and s.row.seconds is not None]
        shares[source] = float(np.mean([low <= ratio <= high for ratio in own]))
    return shares
