"""Test how well the planner predicts whether a run fits into memory, on constructed cases.

Runs that ran out of memory are rarely published. So we construct cases: we take each run with measured memory, and
imagine devices that have less or more memory than the run needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.rows import Row
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.out_of_memory import needed_bytes, p_out_of_memory

CAPACITIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 1.25, 1.4, 1.7, 2.0)
"""Memory of the devices, relative to the memory that a run needs."""
EDGES = (0.0, 0.05, 0.5, 0.95, 1.0)
"""``reliability`` groups the cases by predicted probability. These are the bounds of the groups."""


class FitCases(NamedTuple):
    """For each of n cases, the predicted probability that the case fits into memory, and whether it fits. Both are
    [n]."""

    predicted: np.ndarray
    fits: np.ndarray

    def refused(self, most_out_of_memory: float) -> tuple[float, float]:
        """Refuse each case whose probability of running out of memory is higher than ``most_out_of_memory``. Return two
        fractions: how many of the refused cases do not fit (precision), and how many of the cases that do not fit are
        refused (recall)."""
        refused = 1 - self.predicted > most_out_of_memory
        return float(np.mean(~self.fits[refused])), float(np.mean(refused[~self.fits]))

    def reliability(self) -> list[tuple[float, float, int, float]]:
        """Group the cases by predicted probability. For each group, return its bounds, its number of cases, and the
        fraction of its cases that fit."""
        group = np.clip(np.searchsorted(EDGES, self.predicted, "right") - 1, 0, len(EDGES) - 2)
        return [
            (low, high, int((group == i).sum()), float(self.fits[group == i].mean()))
            for i, (low, high) in enumerate(pairwise(EDGES))
            if (group == i).any()
        ]


def memory_cases(rows: Sequence[Row]) -> FitCases:
    """Build the cases: combine every run that has measured memory with an imagined device of each size in
    ``CAPACITIES``."""
    rows = [row for row in rows if row.memory_gb is not None]
    work, machine = stack([row.work for row in rows]), stack([row.machine for row in rows])
    measured = np.array([row.memory_gb * 1e9 for row in rows if row.memory_gb is not None])
    # The measured memory is more than a run needs, because the allocator keeps freed blocks. So estimate how much
    # memory each run needs.
    needed, held = needed_bytes(measured, work, machine), peak_memory(work, machine)
    predicted = [1 - p_out_of_memory(held, work, replace(machine, memory=capacity * needed)) for capacity in CAPACITIES]
    fits = np.repeat(np.array(CAPACITIES) >= 1, len(rows))
    return FitCases(np.concatenate(predicted), fits)
