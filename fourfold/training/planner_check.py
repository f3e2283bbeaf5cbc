"""Compare the planner's prediction for a run with measurements of its first steps."""

import json
from dataclasses import asdict
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import write_output
from fourfold.planning.calibration.machine_constants import is_calibrated
from fourfold.planning.calibration.measured_run import RunComparison, compare_run
from fourfold.planning.machines.machine import load_machine
from fourfold.training.console import Fact, Facts
from fourfold.training.metrics import StepMetrics

PREDICTION_FILE = "prediction.json"
STEPS = 10
"""Number of steps that are measured, counted from the first step that this process trains."""


class PlannerCheck:
    """Compares the planner's prediction for a run with the measured steps, if ``metrics.machine`` names a machine.

    On a CPU, the machine's file must have constants from `fourfold machine calibrate`. Otherwise nothing is compared.
    Memory is compared only on GPUs, because on a CPU the interpreter takes most of a process's memory.
    """

    def __init__(self, run: RunConfig, run_dir: Path, on_gpu: bool) -> None:
        """Load the machine that ``metrics.machine`` names. Raises ``UserError`` if this machine is unknown."""
        self.run, self.path, self.on_gpu = run, run_dir / PREDICTION_FILE, on_gpu
        self.machine = None if run.metrics.machine is None else load_machine(run.metrics.machine, "metrics.machine =")
        if self.machine is not None and not on_gpu and not is_calibrated(self.machine):
            self.machine = None
        self._seconds: list[float] = []

    def after_step(self, metrics: StepMetrics) -> Facts | None:
        """Record a step. After the last measured step, write the comparison and return it as lines to print. After any
        other step, return None."""
        if self.machine is None or len(self._seconds) == STEPS:
            return None
        self._seconds.append(metrics.step_seconds)
        if len(self._seconds) < STEPS:
            return None
        memory = metrics.peak_memory_bytes if self.on_gpu else None
        compared = compare_run(self.run, self.machine, self._seconds, memory)
        write_output(self.path, json.dumps(asdict(compared), indent=1))
        return facts_of(compared)


def facts_of(compared: RunComparison) -> Facts:
    """Return the comparison as lines to print."""
    facts: dict[str, Fact] = {
        "machine": compared.machine,
        "seconds per step": f"{compared.predicted_step_seconds:.4g} predicted, {compared.measured_step_seconds:.4g} "
        f"measured ({compared.step_error:+.0%})",
    }
    if compared.measured_memory_bytes is not None:
        facts["allocated memory"] = (
            f"{compared.predicted_memory_bytes / 2**30:.2f} GiB predicted, "
            f"{compared.measured_memory_bytes / 2**30:.2f} GiB measured ({compared.memory_error:+.0%})"
        )
    return facts
