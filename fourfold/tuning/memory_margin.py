"""The chance that a layout runs out of memory, learned from trials; and layouts that must run out, as others have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.memory import SPREAD, normal_share
from fourfold.tuning.candidates import Candidates

SHIFTS = np.linspace(-1.5, 1.5, 301)
"""Logarithms of the factor by which all layouts of a search may need more than predicted."""
APART = 0.03
"""Standard deviation of a layout's bytes around the prediction times that factor, of the logarithm."""
RARELY, FAR_OFF = 0.02, 8
"""The probability that the planner's memory is wrong by many times its uncertainty, and how many."""
NEVER = 1e-9
"""Least likelihood of an outcome: a trial that fails for another reason must not decide everything."""

MORE_IS_MORE = ("micro_batch", "recompute_every")
"""Knobs of which more takes more memory."""
MORE_IS_LESS = ("x", "y", "z", "cp", "pp", "zero", "recompute", "offload")
"""Knobs of which more takes less memory, the others equal or no better."""
AS_IT_IS = ("ep", "schedule", "interleave", "cp_method", "batch_parts")
"""Knobs that make two layouts incomparable where they differ; a larger ep may leave the busiest experts on one rank."""


@dataclass
class MemoryMargin:
    """The distribution of the factor between needed and predicted bytes, which all layouts of a search share."""

    candidates: Candidates
    log_weight: np.ndarray = field(default_factory=lambda: _prior())
    """[shifts] logarithm of the weight of each of ``SHIFTS``."""

    def measured(self, index: int, used: float) -> None:
        """Learn from a trial that needed so many bytes."""
        gap = math.log(used / self.candidates.needed[index]) - SHIFTS
        self.log_weight = self.log_weight - np.minimum((gap / APART) ** 2 / 2, -math.log(NEVER))

    def fitted(self, index: int) -> None:
        """Learn from a trial that fitted."""
        self.log_weight = self.log_weight + np.log(1 - self._out(np.array([index]))[:, 0] + NEVER)

    def ran_out(self, index: int) -> None:
        """Learn from a trial that ran out of memory."""
        self.log_weight = self.log_weight + np.log(self._out(np.array([index]))[:, 0] + NEVER)

    def p_out(self) -> np.ndarray:
        """[n] probability of running out of memory."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        return np.asarray(weight @ self._out(np.arange(self.candidates.count)) / weight.sum())

    def _out(self, index: np.ndarray) -> np.ndarray:
        """[shifts, index] probability of running out, for each factor."""
        headroom = np.log(self.candidates.machine.memory / self.candidates.needed[index])
        return np.asarray(normal_share((SHIFTS[:, None] - headroom) / APART))


def _prior() -> np.ndarray:
    """[shifts] the planner's own uncertainty; with a small probability it is far off."""
    one = SPREAD**2 - APART**2
    far = (FAR_OFF * SPREAD) ** 2
    usual, unusual = np.exp(-(SHIFTS**2) / one / 2) / one**0.5, np.exp(-(SHIFTS**2) / far / 2) / far**0.5
    return np.asarray(np.log((1 - RARELY) * usual + RARELY * unusual))


def needs_as_much(candidates: Candidates, index: int) -> np.ndarray:
    """[n] True for layouts that need at least the memory of one, whatever the model of memory says.

    No knob of theirs saves memory against it: micro-batches are as large, axes that divide weights or activations as
    short, states as little sharded, and not more is recomputed.
    """
    knobs = candidates.knobs
    found = np.ones(candidates.count, dtype=bool)
    for name in MORE_IS_MORE:
        found &= knobs[name] >= knobs[name][index]
    for name in MORE_IS_LESS:
        found &= knobs[name] <= knobs[name][index]
    for name in AS_IT_IS:
        found &= knobs[name] == knobs[name][index]
    # States that are sharded over dp shrink as it grows.
    return np.asarray(found & ((knobs["zero"] == 0) | (knobs["dp"] <= knobs["dp"][index])))
