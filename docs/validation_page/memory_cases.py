"""Judges the probability of running out of memory: measured runs on devices whose memory they would, or would not, fit.

Runs that ran out of memory are rarely published. So each run whose memory was measured is put on devices that have a
share of what it needs, and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.rows import Row
from fourfold.planning.cost.memory import needed_bytes, p_out_of_memory, peak_memory

CAPACITIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.25, 1.4, 1.7, 2.0)
"""Memory of the devices, relative to what a run needs."""
EDGES = (0.0, 0.05, 0.5, 0.95, 1.0)
"""Bounds of the groups of predicted probabilities."""


class FitCases(NamedTuple):
    """[n] the predicted probability that a run fits, and whether it does."""

    predicted: np.ndarray
    fits: np.ndarray

    def refused(self, most_out_of_memory: float) -> tuple[float, float]:
        """Precision and recall of refusing what is more likely than that to run out of memory: the share of the refused
        that does not fit, and the share of what does not fit that is refused."""
        refused = 1 - self.predicted > most_out_of_memory
        return float(np.mean(~self.fits[refused])), float(np.mean(refused[~self.fits]))

    def reliability(self) -> list[tuple[float, float, int, float]]:
        """Bounds, cases, and the share of them that fits, of each group of predictions."""
        group = np.clip(np.searchsorted(EDGES, self.predicted, "right") - 1, 0, len(EDGES) - 2)
        return [
            (low, high, int((group == i).sum()), float(self.fits[group == i].mean()))
            for i, (low, high) in enumerate(pairwise(EDGES))
            if (group == i).any()
        ]


def memory_cases(rows: Sequence[Row]) -> FitCases:
    """Put every run whose memory was measured on devices of ``CAPACITIES``."""
    rows = [row for row in rows if row.memory_gb is not None]
    work, machine = stack([row.work for row in rows]), stack([row.machine for row in rows])
    measured = np.array([row.memory_gb * 1e9 for row in rows if row.memory_gb is not None])
    # A run that had room held blocks that it did not need.
    needed, held = needed_bytes(measured, work, machine), peak_memory(work, machine)
    predicted = [1 - p_out_of_memory(held, work, replace(machine, memory=capacity * needed)) for capacity in CAPACITIES]
    fits = np.repeat(np.array(CAPACITIES) >= 1, len(rows))
    return FitCases(np.concatenate(predicted), fits)
