"""Compute the numbers of the tables: means over tasks, and differences between methods, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.sparse_attention.evaluate import Answered

RESAMPLES = 2000
TOLERANCE = 1.1
"""A method is within a budget if it reads at most this multiple of the budget."""

SOLVED = 0.9
"""Dense attention solves a task if its share of right answers is at least this. Only solved tasks count."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and the lower and upper ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.0f} ({100 * self.low:.0f}–{100 * self.high:.0f})"


class Results:
    """The shares of right answers in each context, by method, budget, length, and task."""

    def __init__(self, answered: Iterable[tuple[float, Answered]]) -> None:
        sums: dict[tuple[str, float, int, str], dict[int, list[float]]] = {}
        shares: dict[tuple[str, float, int], list[float]] = {}
        for budget, each in answered:
            key = (each.method, budget, each.length, each.task)
            sums.setdefault(key, {}).setdefault(each.context, []).append(each.right)
            shares.setdefault(key[:3], []).append(each.share)
        self.by_context = {
            key: np.array([np.mean(found[context]) for context in sorted(found)]) for key, found in sums.items()
        }
        self.shares = {key: float(np.mean(found)) for key, found in shares.items()}

    def solved(self, length: int, tasks: Sequence[str]) -> list[str]:
        """Return the tasks that dense attention solves in contexts of this length."""
        return [task for task in tasks if self.by_context["dense", 1.0, length, task].mean() >= SOLVED]

    def mean(self, method: str, budget: float, length: int, tasks: Sequence[str]) -> Estimate | None:
        """Return a method's mean share of right answers over the tasks, or None if the method does not fit into the
        budget."""
        rows = self._rows(method, budget, length, tasks)
        return None if rows is None else estimate(rows)

    def is_within(self, method: str, budget: float, length: int) -> bool:
        """Return whether a method has read at most 10 % more bytes than the budget."""
        return self.shares.get((method, budget, length), 0.0) <= TOLERANCE * budget

    def difference(self, method: str, other: str, budget: float, length: int, tasks: Sequence[str]) -> Estimate | None:
        """Return a method's mean share of right answers minus the mean of another method. Both have answered the same
        questions."""
        rows, others = (self._rows(name, budget, length, tasks) for name in (method, other))
        return None if rows is None or others is None else estimate(rows - others)

    def _rows(self, method: str, budget: float, length: int, tasks: Sequence[str]) -> NDArray[np.float64] | None:
        found = [self.by_context.get((method, budget, length, task)) for task in tasks]
        if not found or any(each is None for each in found):
            return None
        return np.stack([each for each in found if each is not None])


def estimate(rows_TC: NDArray[np.float64]) -> Estimate:
    """Return the mean over tasks and contexts, with an interval from a bootstrap over contexts.

    Args:
        rows_TC: Shares of right answers, with a row per task and a column per context. The bootstrap draws columns.
    """
    rng = np.random.default_rng(0)
    by_context_C = rows_TC.mean(0)
    drawn = by_context_C[rng.integers(0, len(by_context_C), (RESAMPLES, len(by_context_C)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(by_context_C.mean()), float(low), float(high))
