"""Choose the constants for predictions on a machine. Also check whether a workload is similar to the workloads that the
constants were fitted to."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from fourfold.planning.calibration.fit import Calibration, from_table
from fourfold.planning.machines.constants import NAMES, Constants, moved, prior_constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

LONG = 32768
"""A context counts as long if a sequence has at least this number of tokens. Attention then takes much of the step."""
FAR = 2.0
"""A workload is far from the measured rows (the runs that the constants are fitted to) if one of its features
(``range_features``) is outside the range of the rows by more than this factor."""
WAITING = 0.05
"""A batch counts as small if the device waits for the host for more than this fraction of a step."""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("fourfold.planning.calibration") / "calibrated.toml").read_text(encoding="utf-8"))


@cache
def shipped() -> Calibration:
    """Return the calibration that comes with fourfold. docs/planner_validation.py fits it to the measured rows that
    come with fourfold."""
    return from_table(_table()["constants"])


def kind_of_extrapolation(machine: Machine) -> str | None:
    """Return "known machine" if the calibration that comes with fourfold is fitted to rows of this machine, and "new
    machine" otherwise.

    Return None if the machine's file has its own fitted constants, because these replace fourfold's calibration.
    """
    if is_calibrated(machine):
        return None
    return "known machine" if f"machine {machine.name}" in shipped().offsets else "new machine"


def kind_of_step(work: Workload, waiting: float) -> str:
    """Return the kind of a step: "mixture" (a mixture of experts), "long context", "small batch", or "dense" (all other
    steps). Each kind has its own prediction interval.

    Args:
        work: A single workload.
        waiting: Fraction of the predicted step in which the device waits for the host.
    """
    if work.model.num_experts:
        return "mixture"
    if work.step.seq_length >= LONG:
        return "long context"
    return "small batch" if waiting > WAITING else "dense"


def shipped_interval(machine: Machine, kind: str, work: Workload) -> tuple[float, float] | None:
    """Return the 90 % prediction interval of a step time, as two factors on the predicted seconds.

    Multiply the predicted seconds by the two factors. With a probability of 90 %, the measured seconds are between the
    two products. A workload that is far from all measured rows gets the wide interval of an unknown source.

    Args:
        machine: The machine.
        kind: The kind of step (``kind_of_step``).
        work: A single workload.

    Returns:
        The two factors. None if the machine's file has fitted constants.
    """
    extrapolation = kind_of_extrapolation(machine)
    if extrapolation is None:
        return None
    table, features = _table(), range_features(work)
    is_near = all(low / FAR <= features[name] <= high * FAR for name, (low, high) in table["range"].items())
    low, high = table["intervals"][extrapolation][kind] if is_near else table["intervals"]["unknown"]
    return low, high


def shipped_order_factor() -> float:
    """Return how far apart two predicted times must be, as a ratio, so that their order can be trusted.

    If the ratio is larger than this factor, the measured times have the predicted order with a probability of 95 %
    (``order_factor`` in docs/validation_page/error_intervals.py).
    """
    return float(_table()["order"]["factor"])


def constants_for(machine: Machine) -> Constants:
    """Return the constants of the machine's file if it has any, and the constants that come with fourfold otherwise."""
    if not is_calibrated(machine):
        return shipped().constants(machine.name)
    logs = dict(machine.efficiency)
    return moved(prior_constants(), np.log([logs.get(name, 1.0) for name in NAMES]))


def is_calibrated(machine: Machine) -> bool:
    """Return whether the machine's file has its own constants, from ``fourfold machine calibrate``."""
    return bool(machine.efficiency)


def range_features(work: Workload) -> dict[str, float]:
    """Return features of a workload, such as the number of GPUs. A calibration records the range of each feature.

    A prediction for a workload outside this range is an extrapolation.
    """
    layout, step = work.layout, work.step
    return {"gpus": float(layout.gpus), "hidden": float(work.model.hidden_size), "seq": float(step.seq_length),
            "tokens of a micro-batch": float(layout.micro_batch_size * step.seq_length)}  # fmt: skip


def outside_calibrated_range(machine: Machine, work: Workload) -> list[str]:
    """Return one text for each feature of ``work`` that is outside the calibrated range of the machine's constants.
    Each text names the feature, its value, and the range."""
    values = range_features(work)
    return [
        f"{name} {values[name]:,.0f} (calibrated from {low:,.0f} to {high:,.0f})"
        for name, (low, high) in machine.calibrated_range
        if name in values and not low <= values[name] <= high
    ]
