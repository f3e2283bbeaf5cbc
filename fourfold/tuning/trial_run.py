"""Create the run of a trial, and read its measurements afterwards. A trial takes a few steps with one layout."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.config.run import RunConfig
from fourfold.planning.calibration.measured_run import WARM_UP
from fourfold.planning.cost.out_of_memory import UNUSABLE, runtime_bytes
from fourfold.planning.machines.machine import Machine
from fourfold.planning.run_workload import workload_of
from fourfold.run_file.load import make_run
from fourfold.training.metrics import METRICS_FILE, read_metrics
from fourfold.tuning.trial_result import TrialResult

RUN_FOLDER = "run"
"""Name of the run's folder inside the trial's folder."""
LEFT_OUT = ("checkpoint", "validation", "audit", "evaluation", "sample", "metrics", "checks")
"""Sections of the run file that a trial drops, because they add work outside the steps."""
HOPELESS, LEAST_STEPS = 1.5, 3
"""A trial is ended early if it has taken ``LEAST_STEPS`` steps, and every step after the first took more than
``HOPELESS`` times as long as the best trial's step."""


def trial_run(run: RunConfig, folder: Path, steps: int) -> RunConfig:
    """Return the run of a trial. It takes the warm-up steps and ``steps`` measured steps, and does no other work. Its
    output goes to the trial's folder."""
    table = run.model_dump(mode="json", exclude_none=True)
    table = {name: section for name, section in table.items() if name not in LEFT_OUT}
    table |= {"name": RUN_FOLDER, "output_dir": str(folder)}
    table["data"] |= {"validation": []}
    table["training"] |= {"train_steps": WARM_UP + steps}
    table["checkpoint"] = {"save_last": False, "resume": "never"}
    table["fault_tolerance"] |= {"max_restarts": 0, "max_wall_time": 0}
    return make_run(table, where="the trial")


def step_seconds_of(folder: Path) -> list[float]:
    """Return the seconds of each step that a trial has taken so far, including the warm-up."""
    return [record["step_seconds"] for record in _metrics_of(folder)]


def memory_used(folder: Path, run: RunConfig, machine: Machine, on_gpu: bool) -> float | None:
    """Return the peak memory of a trial so far, in bytes. On GPUs it is the peak of a device, and on a CPU the peak of
    a process.

    Return None before the first step.
    """
    peak: float | None = max((record["peak_memory_bytes"] for record in _metrics_of(folder)), default=None)
    if peak is None or not on_gpu:
        return peak
    return float(runtime_bytes(workload_of(run), machine)) + (1 + UNUSABLE) * peak


def _metrics_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / RUN_FOLDER / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def measured(folder: Path, run: RunConfig, machine: Machine, on_gpu: bool) -> TrialResult | None:
    """Return the result of a trial that took all its steps, or None if some are missing."""
    seconds = step_seconds_of(folder)
    if len(seconds) < run.training.train_steps:
        return None
    kept, memory = seconds[WARM_UP:], memory_used(folder, run, machine, on_gpu)
    return TrialResult("done", float(np.median(kept)), error_of_median(kept), memory)


def hopeless(folder: Path, best: float | None) -> TrialResult | None:
    """Return the result of a running trial that is far slower than the best trial.

    Return None if it is not far slower, or if it is too early to tell. ``best`` is the best trial's step time in
    seconds.
    """
    seconds = step_seconds_of(folder)[1:]
    if best is None or len(seconds) < LEAST_STEPS - 1 or min(seconds) <= HOPELESS * best:
        return None
    median = float(np.median(seconds))
    reason = f"{median / best:.1f} times as slow as the best trial, after {len(seconds) + 1} steps"
    return TrialResult("hopeless", median, max(error_of_median(seconds), 0.1), reason=reason)


def error_of_median(seconds: Sequence[float]) -> float:
    """Return the standard error of the logarithm of the median step time.

    We assume normally distributed step times. Then the standard error of the median is 1.25 times the standard error of
    the mean. With fewer than two steps, assume 0.1.
    """
    if len(seconds) < 2:
        return 0.1
    return float(1.25 * np.std(np.log(seconds), ddof=1) / math.sqrt(len(seconds)))
