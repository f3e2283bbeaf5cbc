"""Fits the constants to the user's own runs, and says how well they then predict rows that were not fitted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.rows import Row, read_rows
from fourfold.planning.calibration.score import calibrate_on, errors_of, predict
from fourfold.planning.machines.machine import Machine, check_positive, machine_names
from fourfold.planning.machines.write import with_constants
from fourfold.planning.request import constants_for, features
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict as predict_one
from fourfold.run_file.load import load_run

WARM_UP = 3
"""First steps of a run that are not counted: compilers and allocators work in them."""
FOLDS = 5
RUN_SOURCE = "run"
"""Of rows that are runs of fourfold."""


@dataclass(frozen=True)
class Fitted:
    """The machine with fitted constants; error on rows that were not fitted (cross-validation), before and after."""

    machine: Machine
    rows: int
    skipped: dict[str, int]
    before: dict[str, float | int | None]
    held_out: dict[str, float | int | None]


def calibrate(paths: Sequence[Path], base: Machine, name: str, seed: int = 0) -> Fitted:
    """From tables of rows (.csv) and metrics of runs (metrics.jsonl, its run.toml beside it)."""
    rows, skipped = read_rows([path for path in paths if path.suffix == ".csv"])
    rows += [row_of_run(path, base) for path in paths if path.suffix != ".csv"]
    # One machine and one program: levels below "all" would take what belongs to it. What is no built-in machine is the
    # user's own, whatever the rows call its GPUs.
    own = base.name not in machine_names()
    rows = [replace(row, machine=base) if own or row.source == RUN_SOURCE else row for row in rows]
    rows = [replace(row, source=name) if row.source == RUN_SOURCE else row for row in rows]
    rows = [row for row in rows if row.seconds is not None]
    if others := sorted({row.machine.name for row in rows} - {base.name}):
        raise UserError(
            f"the rows are of {' and '.join(others)}, and --machine is {base.name}; calibrate one machine at a time, "
            f"with --machine {others[0]}"
        )
    if not rows:
        raise UserError("no row with a step time to calibrate on: " + (", ".join(skipped) or "the files are empty"))
    calibration = calibrate_on(rows)
    known = [s for s in predict(rows, Calibration()) if s.error is not None]
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = []
    for fold in range(min(FOLDS, len(rows)) if len(rows) > 1 else 0):
        out = set(order[fold::FOLDS].tolist())
        fit_rows = [row for i, row in enumerate(rows) if i not in out]
        held_out += predict([rows[i] for i in sorted(out)], calibrate_on(fit_rows))
    sources = {row.source for row in rows}
    logs = calibration.logs(base.name, sources.pop() if len(sources) == 1 else "")
    values = [features(row.work) for row in rows]
    extent = {key: (min(v[key] for v in values), max(v[key] for v in values)) for key in values[0]}
    return Fitted(with_constants(base, name, logs, extent), len(rows), skipped, errors_of(known), errors_of(held_out))


def row_of_run(path: Path, machine: Machine) -> Row:
    """A run's median step, from its metrics and the run file beside them."""
    run_file = path.with_name("run.toml")
    if not run_file.is_file():
        raise UserError(f"{run_file} does not exist: metrics.jsonl must stand in the folder of its run")
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        raise UserError(f"{path} is not JSON, one object a line: {error}") from None
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
        memory_gb=max(peaks) / 1e9 if peaks else None, out_of_memory=False, ran=True, dense_half=work.bits == 16,
        sweep=(RUN_SOURCE,),
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Of the first steps of a run: median seconds of one, and bytes that the first process has allocated at most;
    predicted and measured (None: not measured)."""

    machine: str
    steps: int
    predicted_step_seconds: float
    measured_step_seconds: float
    predicted_memory_bytes: int
    measured_memory_bytes: int | None

    @property
    def step_error(self) -> float:
        return self.predicted_step_seconds / self.measured_step_seconds - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.measured_memory_bytes
        return None if measured is None else self.predicted_memory_bytes / measured - 1


def predicted_against_measured(
    run: RunConfig, machine: Machine, seconds: Sequence[float], memory_bytes: int | None
) -> Comparison:
    """What the plan says of a run, beside its steps so far. What the runtime and the allocator take besides is not
    compared: nothing in the process measures it."""
    told = predict_one(workload_of(run), machine, constants_for(machine))
    allocated = sum(size for name, size in told.stages[0].items() if name != "reserve")
    measured = float(np.median(seconds[WARM_UP:]))
    return Comparison(machine.name, len(seconds), told.seconds, measured, round(allocated), memory_bytes)


def is_calibrated(machine: Machine) -> bool:
    """Whether its constants were measured or fitted by ``fourfold calibrate``."""
    return bool(machine.efficiency)
