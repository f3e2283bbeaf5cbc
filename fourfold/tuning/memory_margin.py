"""Learn from trials how likely each layout is to run out of memory.

If a layout has run out of memory, ``needs_as_much`` finds all layouts that need at least as much memory.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.out_of_memory import SPREAD, normal_share
from fourfold.tuning.candidates import Candidates

SHIFTS = np.linspace(-1.5, 1.5, 301)
"""The values that log(needed bytes / predicted bytes) may have. The model assumes one value for all layouts of a
search."""
APART = 0.03
"""A layout's own value of log(needed bytes / predicted bytes) differs a little from the value that all layouts share.
This is the standard deviation of the difference."""
RARELY, FAR_OFF = 0.02, 8
"""With the probability ``RARELY``, the planner's memory prediction is far off, and the standard deviation of its error
is ``FAR_OFF`` times as large."""
NEVER = 1e-9
"""Lower bound on the probability of a trial's outcome. This bound limits the effect of a single outcome, for example of
a trial that seems to have run out of memory but failed for another reason."""

MORE_IS_MORE = ("micro_batch_size", "recompute_every")
"""Knobs for which a larger value needs more memory."""
MORE_IS_LESS = ("x", "y", "z", "cp", "pp", "zero", "recompute", "offload")
"""Knobs for which a larger value needs less memory."""
AS_IT_IS = ("ep", "schedule", "stages_per_rank", "cp_method", "batch_parts")
"""Knobs whose effect on memory is uncertain. For example, a larger ep (the axis that splits experts) can put the
busiest experts on one rank."""


@dataclass
class MemoryMargin:
    """The probability distribution of the ratio needed bytes / predicted bytes. All layouts of a search share this
    ratio, except for small differences (see ``APART``)."""

    candidates: Candidates
    log_weight: np.ndarray = field(default_factory=lambda: _prior())
    """Logarithm of the probability of each value in ``SHIFTS``, up to a constant."""

    def measured(self, index: int, used: float) -> None:
        """Update the distribution with a trial of candidate ``index`` that used ``used`` bytes."""
        gap = math.log(used / self.candidates.needed[index]) - SHIFTS
        self.log_weight = self.log_weight - np.minimum((gap / APART) ** 2 / 2, -math.log(NEVER))

    def fitted(self, index: int) -> None:
        """Update the distribution with a trial of candidate ``index`` that fit into memory."""
        self.log_weight = self.log_weight + np.log(1 - self._out(np.array([index]))[:, 0] + NEVER)

    def ran_out(self, index: int) -> None:
        """Update the distribution with a trial of candidate ``index`` that ran out of memory."""
        self.log_weight = self.log_weight + np.log(self._out(np.array([index]))[:, 0] + NEVER)

    def p_out(self) -> np.ndarray:
        """Return each layout's probability of running out of memory [n]."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        return np.asarray(weight @ self._out(np.arange(self.candidates.count)) / weight.sum())

    def _out(self, index: np.ndarray) -> np.ndarray:
        """Return the probability of running out of memory for each value in ``SHIFTS`` and each candidate in ``index``,
        [shifts, index]."""
        headroom = np.log(self.candidates.machine.memory / self.candidates.needed[index])
        return np.asarray(normal_share((SHIFTS[:, None] - headroom) / APART))


def _prior() -> np.ndarray:
    """Return ``log_weight`` before any trial. The distribution follows from the planner's uncertainty, with a small
    probability that the prediction is far off."""
    one = SPREAD**2 - APART**2
    far = (FAR_OFF * SPREAD) ** 2
    usual, unusual = np.exp(-(SHIFTS**2) / one / 2) / one**0.5, np.exp(-(SHIFTS**2) / far / 2) / far**0.5
    return np.asarray(np.log((1 - RARELY) * usual + RARELY * unusual))


def needs_as_much(candidates: Candidates, index: int) -> np.ndarray:
    """Return an array [n] that is True for layouts that certainly need at least as much memory as the layout at
    ``index``.

    No knob of such a layout has a value that saves memory, compared with the layout at ``index``. Its micro-batches are
    not smaller. The axes that divide weights or activations are not larger. It does not shard, recompute, or offload
    more.
    """
    knobs = candidates.knobs
    found = np.ones(candidates.count, dtype=bool)
    for name in MORE_IS_MORE:
        found &= knobs[name] >= knobs[name][index]
    for name in MORE_IS_LESS:
        found &= knobs[name] <= knobs[name][index]
    for name in AS_IT_IS:
        found &= knobs[name] == knobs[name][index]
    # With ZeRO, a larger dp saves memory too, because optimizer states are sharded over dp.
    return np.asarray(found & ((knobs["zero"] == 0) | (knobs["dp"] <= knobs["dp"][index])))
