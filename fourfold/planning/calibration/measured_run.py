"""Use runs of fourfold as measurements, for a fit of constants or to compute the error of a run's prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.calibration.rows import Row
from fourfold.planning.machines.machine import Machine, check_positive
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.run_file.load import load_run
from fourfold.untrusted_files import read_text_file

WARM_UP = 3
"""Number of steps to skip at the start of a run, while compilers and allocators warm up."""
RUN_SOURCE = "run"
"""Source name of rows that come from runs of fourfold."""


@dataclass(frozen=True)
class RunComparison:
    """Predicted and measured step time and memory of a run's first steps."""

    machine: str
    steps: int
    """Number of measured steps, including the ``WARM_UP`` steps."""
    predicted_step_seconds: float
    measured_step_seconds: float
    """Median of the measured step times after the first ``WARM_UP`` steps, in seconds."""
    predicted_memory_bytes: int
    """Predicted peak memory of the first process, without the runtime and the allocator's cache."""
    measured_memory_bytes: int | None
    """Largest number of bytes that the first process has allocated. None if it was not measured."""

    @property
    def step_error(self) -> float:
        """Return the relative error of the predicted step time."""
        return self.predicted_step_seconds / self.measured_step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Return the relative error of the predicted memory, or None if memory was not measured."""
        measured = self.measured_memory_bytes
        return None if measured is None else self.predicted_memory_bytes / measured - 1


def compare_run(run: RunConfig, machine: Machine, seconds: Sequence[float], memory_bytes: int | None) -> RunComparison:
    """Compare a run's prediction with its measured step times and allocated bytes.

    Neither the prediction nor ``memory_bytes`` includes the memory of the runtime and of the allocator's cache.

    Args:
        run: The run.
        machine: The machine that the run used.
        seconds: Seconds of each step, starting with the first step. The sequence needs more than ``WARM_UP`` entries.
        memory_bytes: Largest number of bytes that the first process had allocated. None if it was not measured.

    Raises:
        UserError: The planner cannot predict the run.
    """
    prediction = predict(workload_of(run), machine, constants_for(machine))
    allocated = sum(size for name, size in prediction.stages[0].items() if name != "reserve")
    measured = float(np.median(seconds[WARM_UP:]))
    return RunComparison(machine.name, len(seconds), prediction.seconds, measured, round(allocated), memory_bytes)


def row_of_run(path: Path, machine: Machine) -> Row:
    """Return a run as a measured row for a fit. The row has the median step time and the peak memory from the run's
    metrics.jsonl, and the workload from the run.toml in the same folder.

    Raises:
        UserError: One of the files is missing or invalid, no step after the first ``WARM_UP`` is recorded, or the
            planner cannot predict the run.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give the metrics.jsonl of a run, or a table of rows (.csv)")
    run_file = path.with_name("run.toml")
    if not run_file.is_file():
        raise UserError(f"{path} has no run.toml in its folder; give a metrics.jsonl of a run, or rows (.csv)")
    text = read_text_file(path, "", "give the metrics.jsonl of a run")
    try:
        records = [parse_json(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} is not JSON, one object per line: {error}") from None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{path}, record {number} is not an object of metrics")
        for name in ("step_seconds", "peak_memory_bytes"):
            if record.get(name) is not None:
                check_positive(record[name], f"{path}, record {number}: {name}")
    seconds = [r["step_seconds"] for r in records if r.get("step_seconds")][WARM_UP:]
    if not seconds:
        raise UserError(f"{path} records no step beyond the first {WARM_UP}; train longer")
    work = workload_of(load_run(run_file))
    peaks = [r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")]
    return Row(
        row_id=path.parent.name, source=RUN_SOURCE, work=work, machine=machine, seconds=float(np.median(seconds)),
        memory_gb=max(peaks) / 1e9 if peaks else None, out_of_memory=False, ran=True, dense_half=work.step.bits == 16,
        sweep=(RUN_SOURCE,),
    )  # fmt: skip
