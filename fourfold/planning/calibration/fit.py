"""Fit the planner's constants to measured steps, by a robust regression with priors and several levels.

The constants of a row are the medians of the priors, times exp(all + machine + source). The fit pulls each of the three
terms (*levels*) towards zero. So if a machine or a source has few rows, its term stays close to zero. If it has none,
its term is zero. Huber's loss limits the influence of outliers.

All rows of a source come from the same program, so they say little about other sources. Therefore the first fit assumes
much noise, and n rows of a source have only the weight of sqrt(n) rows. A second fit assumes only the noise between
runs. It predicts rows of a known source on a known machine. The difference between the two fits is a fourth level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import NAMES, PRIORS, Constants, moved, prior_constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

LEVEL_SPREAD = {"all": 0.5, "machine": 0.25, "source": 1.0}
"""Spread of the logarithms at each level, in units of the prior's spread."""
NOISE_BETWEEN = 0.1
"""Standard deviation of the logarithm of measured step times around the first fit, which all sources share."""
NOISE_WITHIN = 0.03
"""The same for the second fit, of one source: variation between runs, and effects that the cost model omits."""
HUBER = 1.5
"""Size of a residual, in standard deviations, beyond which the loss is linear."""
ITERATIONS = 25
STEP = 1e-4
"""Step size in the logarithms for finite differences."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, as logarithms of their ratio to the priors' medians."""

    offsets: dict[str, np.ndarray] = field(default_factory=dict)
    """The logarithms [constants] at each level: "all", "machine NAME", "source NAME", "known NAME on MACHINE"."""

    def logs(self, machine: str, source: str) -> np.ndarray:
        """Return the sum of the levels, [constants]. A level without rows counts as zero."""
        zero = np.zeros(len(NAMES))
        levels = (*levels_of(machine, source), known_level(machine, source))
        return sum((self.offsets.get(level, zero) for level in levels), zero)

    def constants(self, machine: str = "", source: str = "") -> Constants:
        return moved(prior_constants(), self.logs(machine, source))


def levels_of(machine: str, source: str) -> tuple[str, str, str]:
    return ("all", f"machine {machine}", f"source {source}")


def known_level(machine: str, source: str) -> str:
    return f"known {source} on {machine}"


def fit(
    work: Workload, machine: Machine, seconds: np.ndarray, machines: Sequence[str], sources: Sequence[str],
    known: bool = True,
) -> Calibration:  # fmt: skip
    """Find the constants that make ``seconds`` most likely. If ``known`` is set, also fit each source on its own."""
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
    """Find the most likely levels by iteratively reweighted Gauss–Newton."""
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

    # For the finite differences, evaluate all rows and ten copies of them, one per shifted constant, in one call. This
    # is quicker than eleven calls.
    again = np.tile(np.arange(len(seconds)), 1 + len(NAMES))
    moves = np.repeat(np.vstack([np.zeros(len(NAMES)), STEP * np.eye(len(NAMES))]), len(seconds), axis=0)
    repeated = work.take(again), machine.take(again)

    def log_predicted(theta: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(step_seconds(work, machine, moved(prior_constants(), membership @ theta))))

    def predicted_and_slopes(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the predictions [rows] and their slopes [rows, constants]."""
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
    """Read a calibration from a table of factors on the priors, by level and constant."""
    return Calibration({key: np.log([factors[name] for name in NAMES]) for key, factors in table.items()})


def to_toml(calibration: Calibration) -> str:
    """Return the factors on the priors as TOML, by level and constant. ``from_table`` reads the parsed text."""
    lines = []
    for key, logs in calibration.offsets.items():
        factors = ", ".join(f"{name} = {factor:.4f}" for name, factor in zip(NAMES, np.exp(logs), strict=True))
        lines.append(f'"{key}" = {{ {factors} }}')
    return "[constants]\n" + "\n".join(lines) + "\n"
