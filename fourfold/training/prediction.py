"""What the planner said of this run beside what it takes, once there is something to compare."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.data.files import write_whole
from fourfold.planning.calibration.machine_constants import is_calibrated
from fourfold.planning.calibration.measured_run import RunComparison, compare_run
from fourfold.planning.machines.machine import load_machine
from fourfold.training.console import Facts
from fourfold.training.metrics import StepMetrics

FORECAST_FILE = "prediction.json"
STEPS = 10
"""Steps of this job after which they are compared."""


class Forecast:
    """Compares on the first process of a job whose run file names its machine.

    A CPU is predicted only by a machine file that was measured on one, and its memory not at all: what the process
    holds is mostly the interpreter's.
    """

    def __init__(self, run: RunConfig, run_dir: Path, on_gpu: bool) -> None:
        """Raises ``UserError`` for a machine that is unknown."""
        self.run, self.path, self.on_gpu = run, run_dir / FORECAST_FILE, on_gpu
        self.machine = None if run.metrics.machine is None else load_machine(run.metrics.machine)
        if self.machine is not None and not on_gpu and not is_calibrated(self.machine):
            self.machine = None
        self._seconds: list[float] = []

    def after_step(self, metrics: StepMetrics) -> Facts | None:
        """Note a step; after the last that is needed the comparison to show, which is also written down."""
        if self.machine is None or len(self._seconds) == STEPS:
            return None
        self._seconds.append(metrics.step_seconds)
        if len(self._seconds) < STEPS:
            return None
        memory = metrics.peak_memory_bytes if self.on_gpu else None
        compared = compare_run(self.run, self.machine, self._seconds, memory)
        write_whole(self.path, json.dumps(asdict(compared), indent=1).encode())
        return facts_of(compared)


def facts_of(compared: RunComparison) -> Facts:
    """In words."""
    facts = {
        "machine": compared.machine,
        "seconds a step": f"{compared.predicted_step_seconds:.4g} predicted, {compared.measured_step_seconds:.4g} "
        f"measured ({compared.step_error:+.0%})",
    }
    if compared.measured_memory_bytes is not None:
        facts["allocated memory"] = (
            f"{compared.predicted_memory_bytes / 2**30:.2f} GiB predicted, "
            f"{compared.measured_memory_bytes / 2**30:.2f} GiB measured ({compared.memory_error:+.0%})"
        )
    return facts
