"""Learn from trials how likely each layout is to run out of memory.

If a layout has run out of memory, all layouts that need at least as much memory are ruled out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.memory import SPREAD, normal_share
from fourfold.tuning.candidates import Candidates

SHIFTS = np.linspace(-1.5, 1.5, 301)
"""The possible values of the logarithm of needed / predicted memory. All layouts of a search share this factor."""
APART = 0.03
"""Standard deviation of the logarithm of the bytes that a layout needs. The mean is the prediction times the shared
factor."""
RARELY, FAR_OFF = 0.02, 8
"""Probability that the planner's memory prediction is far off, and the factor by which its standard deviation then
grows."""
NEVER = 1e-9
"""Lowest likelihood of an outcome. It limits the effect of a trial that fails for another reason."""

MORE_IS_MORE = ("micro_batch_size", "recompute_every")
"""Knobs that increase memory when they grow."""
MORE_IS_LESS = ("x", "y", "z", "cp", "pp", "zero", "recompute", "offload")
"""Knobs that reduce memory when they grow."""
AS_IT_IS = ("ep", "schedule", "stages_per_rank", "cp_method", "batch_parts")
"""Knobs that make two layouts incomparable if they differ. For example, a larger ep (the axis that splits experts) can
put the busiest experts on one rank."""


@dataclass
class MemoryMargin:
    """The probability distribution of the factor between needed and predicted bytes. All layouts of a search share this
    factor."""

    candidates: Candidates
    log_weight: np.ndarray = field(default_factory=lambda: _prior())
    """Logarithm of the weight of each value in ``SHIFTS``."""

    def measured(self, index: int, used: float) -> None:
        """Learn from a trial that needed ``used`` bytes."""
        gap = math.log(used / self.candidates.needed[index]) - SHIFTS
        self.log_weight = self.log_weight - np.minimum((gap / APART) ** 2 / 2, -math.log(NEVER))

    def fitted(self, index: int) -> None:
        """Learn from a trial that fit."""
        self.log_weight = self.log_weight + np.log(1 - self._out(np.array([index]))[:, 0] + NEVER)

    def ran_out(self, index: int) -> None:
        """Learn from a trial that ran out of memory."""
        self.log_weight = self.log_weight + np.log(self._out(np.array([index]))[:, 0] + NEVER)

    def p_out(self) -> np.ndarray:
        """Return each layout's probability of running out of memory [n]."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        return np.asarray(weight @ self._out(np.arange(self.candidates.count)) / weight.sum())

    def _out(self, index: np.ndarray) -> np.ndarray:
        """Return the probability of running out of memory for each factor and layout [shifts, index]."""
        headroom = np.log(self.candidates.machine.memory / self.candidates.needed[index])
        return np.asarray(normal_share((SHIFTS[:, None] - headroom) / APART))


def _prior() -> np.ndarray:
    """Return the logarithms of the weights of ``SHIFTS`` before any trial. They follow from the planner's uncertainty,
    with a small probability that its prediction is far off."""
    one = SPREAD**2 - APART**2
    far = (FAR_OFF * SPREAD) ** 2
    usual, unusual = np.exp(-(SHIFTS**2) / one / 2) / one**0.5, np.exp(-(SHIFTS**2) / far / 2) / far**0.5
    return np.asarray(np.log((1 - RARELY) * usual + RARELY * unusual))


def needs_as_much(candidates: Candidates, index: int) -> np.ndarray:
    """Return an array [n] that is True for layouts that certainly need at least as much memory as the layout at
    ``index``.

    These are the layouts that save no memory by any knob: micro-batches are not smaller, axes that divide weights or
    activations are not larger, and the layout does not shard, recompute, or offload more.
    """
    knobs = candidates.knobs
    found = np.ones(candidates.count, dtype=bool)
    for name in MORE_IS_MORE:
        found &= knobs[name] >= knobs[name][index]
    for name in MORE_IS_LESS:
        found &= knobs[name] <= knobs[name][index]
    for name in AS_IT_IS:
        found &= knobs[name] == knobs[name][index]
    # If states are sharded over dp, they shrink as dp grows.
    return np.asarray(found & ((knobs["zero"] == 0) | (knobs["dp"] <= knobs["dp"][index])))
