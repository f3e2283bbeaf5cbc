"""Fits the planner's constants to measured steps: robust regression with a prior, in three levels.

A row's constants are exp(all + machine + program) times the priors' medians. Each level is shrunk to zero: a machine or
a program with few rows stays near what all have in common, and one without rows has exactly that. Huber's loss bounds
the influence of outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fourfold.planning.cost.step import step_seconds
from fourfold.planning.machines.constants import NAMES, PRIORS, Constants, moved, prior_constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

LEVEL_SPREAD = {"all": 0.5, "machine": 0.25, "program": 1.0}
"""Spread of each level's logarithms, in units of the prior's."""
NOISE = 0.03
"""Standard deviation of the logarithm of a measured step: variation between runs, and what the cost model omits."""
HUBER = 1.5
"""Residuals, in standard deviations, beyond which the loss is linear."""
ITERATIONS = 25
STEP = 1e-4
"""Step of the logarithms in finite differences."""


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, as logarithms of their ratio to the priors' medians."""

    offsets: dict[str, np.ndarray] = field(default_factory=dict)
    """[constants] by level: "all", "machine NAME", "program NAME"."""

    def logs(self, machine: str, program: str) -> np.ndarray:
        """Sum the levels to [constants]; a level without rows is zero."""
        zero = np.zeros(len(NAMES))
        return sum((self.offsets.get(level, zero) for level in levels_of(machine, program)), zero)

    def constants(self, machine: str = "", program: str = "") -> Constants:
        return moved(prior_constants(), self.logs(machine, program))

    def stacked(self, machines: Sequence[str], programs: Sequence[str]) -> Constants:
        """Return constants as arrays, with one entry per case."""
        logs = np.array([self.logs(m, p) for m, p in zip(machines, programs, strict=True)])
        return moved(prior_constants(), logs.reshape(-1, len(NAMES)))


def levels_of(machine: str, program: str) -> tuple[str, str, str]:
    return ("all", f"machine {machine}", f"program {program}")


def fit(
    work: Workload, machine: Machine, seconds: np.ndarray, machines: Sequence[str], programs: Sequence[str]
) -> Calibration:
    """Find the constants that make the measured ``seconds`` likeliest, by iteratively reweighted Gauss–Newton."""
    keys = [levels_of(m, p) for m, p in zip(machines, programs, strict=True)]
    names = list(dict.fromkeys(key for row in keys for key in row))
    index = {name: i for i, name in enumerate(names)}
    membership = np.zeros((len(seconds), len(names)))
    for row, row_keys in enumerate(keys):
        membership[row, [index[key] for key in row_keys]] = 1.0
    spreads = np.array([prior.spread for prior in PRIORS.values()])
    levels = np.array([LEVEL_SPREAD[name.split()[0]] for name in names])
    precision = 1.0 / (levels[:, None] * spreads[None, :]) ** 2
    theta = np.zeros((len(names), len(NAMES)))

    def log_predicted(theta: np.ndarray, bump: int | None = None) -> np.ndarray:
        logs = membership @ theta
        if bump is not None:
            logs[:, bump] += STEP
        return np.asarray(np.log(step_seconds(work, machine, moved(prior_constants(), logs))))

    def cost(theta: np.ndarray) -> float:
        scaled = np.abs(log_predicted(theta) - np.log(seconds)) / NOISE
        huber = np.where(scaled < HUBER, scaled**2 / 2, HUBER * (scaled - HUBER / 2))
        return float(huber.sum() + (precision * theta**2).sum() / 2)

    now, damping = cost(theta), 1.0
    for _ in range(ITERATIONS):
        predicted = log_predicted(theta)
        residual = predicted - np.log(seconds)
        slopes = np.stack([(log_predicted(theta, i) - predicted) / STEP for i in range(len(NAMES))], axis=1)
        weights = np.minimum(1.0, HUBER * NOISE / np.maximum(np.abs(residual), 1e-12)) / NOISE**2
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
    """Read a calibration from factors on the priors, by level and constant."""
    return Calibration({key: np.log([factors[name] for name in NAMES]) for key, factors in table.items()})


def to_toml(calibration: Calibration) -> str:
    """Write the factors on the priors, by level and constant, as ``from_table`` reads them."""
    lines = []
    for key, logs in calibration.offsets.items():
        factors = ", ".join(f"{name} = {factor:.4f}" for name, factor in zip(NAMES, np.exp(logs), strict=True))
        lines.append(f'"{key}" = {{ {factors} }}')
    return "[constants]\n" + "\n".join(lines) + "\n"
