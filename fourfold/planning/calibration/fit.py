"""Fit the planner's constants to measured step times, with a robust hierarchical regression.

A *row* is one measured run. Every constant has a prior (``machines.constants``). The constants of a row are the medians
of their priors, times exp(all + machine + source). The three terms are called *levels*: one for all rows, one for each
machine, and one for each source, such as a publication. The fit pulls every level towards 0. So the level of a machine
or a source with few rows stays close to 0, and without rows it is 0. Huber's loss limits the influence of outliers.

The rows of a source come from the same experiments, so they say little about other sources. Therefore the first fit
assumes large noise, and gives n rows of a source only the weight of √n rows. A second fit gives all rows the same
weight and assumes only the noise between runs. If a source has rows on a machine, predictions for this source and
machine use the second fit. The difference between the two fits is stored as a fourth level.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import NAMES, PRIORS, Constants, moved, prior_constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

LEVEL_SPREAD = {"all": 0.5, "machine": 0.25, "source": 1.0}
"""For each kind of level, the standard deviation of its prior, in units of the constant's ``Prior.spread``. The mean of
the prior is 0."""
NOISE_BETWEEN = 0.1
"""Noise of the first fit: standard deviation of log(measured / predicted) for step times of all sources."""
NOISE_WITHIN = 0.03
"""Noise of the second fit: standard deviation of log(measured / predicted) for step times of one source. This noise
covers the variation between runs, and effects that the cost model omits."""
HUBER = 1.5
"""Residuals above this number of standard deviations of the noise are penalized linearly instead of quadratically."""
ITERATIONS = 25
"""Largest number of Gauss–Newton steps."""
STEP = 1e-4
"""Step of the finite differences, in the logarithm of a constant."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, as logarithms of their ratios to the medians of the priors."""

    offsets: dict[str, np.ndarray] = field(default_factory=dict)
    """The value of each level, an array [constants] of logarithms. The keys are "all", "machine NAME", "source NAME",
    and "known NAME on MACHINE"."""

    def logs(self, machine: str, source: str) -> np.ndarray:
        """Return the sum of the levels that apply to a machine and a source, [constants]. A level without rows counts
        as 0."""
        zero = np.zeros(len(NAMES))
        levels = (*levels_of(machine, source), known_level(machine, source))
        return sum((self.offsets.get(level, zero) for level in levels), zero)

    def constants(self, machine: str = "", source: str = "") -> Constants:
        """Return the constants for a machine and a source. An empty name stands for a machine or source without
        rows."""
        return moved(prior_constants(), self.logs(machine, source))


def levels_of(machine: str, source: str) -> tuple[str, str, str]:
    """Return the names of the three levels that apply to a row in the first fit."""
    return ("all", f"machine {machine}", f"source {source}")


def known_level(machine: str, source: str) -> str:
    """Return the name of the fourth level, for a source that has rows on this machine."""
    return f"known {source} on {machine}"


def fit(
    work: Workload, machine: Machine, seconds: np.ndarray, machines: Sequence[str], sources: Sequence[str],
    known: bool = True,
) -> Calibration:  # fmt: skip
    """Fit the constants to measured step times.

    Args:
        work: The workloads of all rows, stacked into one workload of arrays [rows].
        machine: The machines of all rows, stacked into one machine of arrays [rows].
        seconds: The measured seconds per step [rows].
        machines: The machine name of each row.
        sources: The source name of each row.
        known: Whether to also fit the fourth level, for each source and each machine that the source has rows on.
    """
    counts = Counter(sources)
    weights = np.array([counts[source] ** -0.5 for source in sources])
    cases = (work, machine, seconds, machines, sources)
    between = _levels(*cases, weights, NOISE_BETWEEN)
    if not known:
        return between
    within = _levels(*cases, np.ones(len(seconds)), NOISE_WITHIN)
    pairs = dict.fromkeys(zip(machines, sources, strict=True))
    return Calibration(
        between.offsets | {known_level(*pair): within.logs(*pair) - between.logs(*pair) for pair in pairs}
    )


def _levels(
    work: Workload, machine: Machine, seconds: np.ndarray, machines: Sequence[str], sources: Sequence[str],
    row_weights: np.ndarray, noise: float,
) -> Calibration:  # fmt: skip
    """Find the most likely levels with iteratively reweighted Gauss–Newton steps."""
    keys = [levels_of(m, s) for m, s in zip(machines, sources, strict=True)]
    names = list(dict.fromkeys(key for row in keys for key in row))
    index = {name: i for i, name in enumerate(names)}
    membership = np.zeros((len(seconds), len(names)))
    for row, row_keys in enumerate(keys):
        membership[row, [index[key] for key in row_keys]] = 1.0
    spreads = np.array([prior.spread for prior in PRIORS.values()])
    levels = np.array([LEVEL_SPREAD[name.split()[0]] for name in names])
    precision = 1.0 / (levels[:, None] * spreads[None, :]) ** 2
    theta = np.zeros((len(names), len(NAMES)))

    # The derivatives are finite differences. So predict each row with the current constants, and then again with each
    # constant shifted by STEP. One call for all predictions is faster than one call per constant.
    again = np.tile(np.arange(len(seconds)), 1 + len(NAMES))
    moves = np.repeat(np.vstack([np.zeros(len(NAMES)), STEP * np.eye(len(NAMES))]), len(seconds), axis=0)
    repeated = work.take(again), machine.take(again)

    def log_predicted(theta: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(step_seconds(work, machine, moved(prior_constants(), membership @ theta))))

    def predicted_and_slopes(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithms of the predicted seconds [rows], and their derivatives with respect to the
        logarithms of the constants [rows, constants]."""
        logs = (membership @ theta)[again] + moves
        values = np.log(step_seconds(*repeated, moved(prior_constants(), logs))).reshape(-1, len(seconds))
        return values[0], (values[1:] - values[0]).T / STEP

    def cost(theta: np.ndarray) -> float:
        scaled = np.abs(log_predicted(theta) - np.log(seconds)) / noise
        huber = np.where(scaled < HUBER, scaled**2 / 2, HUBER * (scaled - HUBER / 2))
        return float((row_weights * huber).sum() + (precision * theta**2).sum() / 2)

    now, damping = cost(theta), 1.0
    for _ in range(ITERATIONS):
        predicted, slopes = predicted_and_slopes(theta)
        residual = predicted - np.log(seconds)
        weights = row_weights * np.minimum(1.0, HUBER * noise / np.maximum(np.abs(residual), 1e-12)) / noise**2
        jacobian = (membership[:, :, None] * slopes[:, None, :]).reshape(len(seconds), -1)
        normal = jacobian.T @ (weights[:, None] * jacobian) + np.diag(precision.ravel())
        gradient = jacobian.T @ (weights * residual) + (precision * theta).ravel()
        step = np.linalg.solve(normal, gradient).reshape(theta.shape)
        damping = min(1.0, 2 * damping)
        while damping > 1e-3 and cost(theta - damping * step) > now:
            damping /= 2
        if damping <= 1e-3:
            break
        theta = theta - damping * step
        before, now = now, cost(theta)
        if before - now < 1e-3:
            break
    return Calibration({name: theta[i] for name, i in index.items()})


def from_table(table: dict[str, dict[str, float]]) -> Calibration:
    """Create a calibration from a table of factors, by level and then by constant. Each factor multiplies the median of
    the constant's prior."""
    return Calibration({key: np.log([factors[name] for name in NAMES]) for key, factors in table.items()})


def to_toml(calibration: Calibration) -> str:
    """Return a calibration as TOML. In the table [constants], each key is a level, and its value has one factor per
    constant. ``from_table`` reads this table."""
    lines = []
    for key, logs in calibration.offsets.items():
        factors = ", ".join(f"{name} = {factor:.4f}" for name, factor in zip(NAMES, np.exp(logs), strict=True))
        lines.append(f'"{key}" = {{ {factors} }}')
    return "[constants]\n" + "\n".join(lines) + "\n"
