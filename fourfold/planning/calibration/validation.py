"""Validate the planner by comparing its predictions with measured rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import UserError, given_as
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import is_calibrated, shipped
from fourfold.planning.calibration.rows import Row, measured_table, read_rows
from fourfold.planning.calibration.score import (
    KEYS,
    Scored,
    errors_of,
    fit_rows,
    predict_left_out,
    predict_rows,
    rows_to_fit,
    summary,
)


@dataclass(frozen=True)
class Validation:
    """The predictions for the measured rows of a file."""

    constants: str
    """A phrase that tells the user where the constants come from."""
    skipped: dict[str, list[str]]
    """Names of skipped rows, by reason."""
    scored: list[Scored]
    """The rows with their predictions."""
    machine_only: list[Scored]
    """The same rows, predicted with unfitted constants (the medians of the priors)."""

    def record(self, rows: bool = False) -> dict[str, Any]:
        """Return the scores as JSON values. With ``rows``, include the prediction of every row."""
        dense = [s for s in self.machine_only if s.row.dense_half and s.error is not None]
        record = {"constants": self.constants, "skipped": self.skipped, **summary(self.scored),
                  "machine_file_only": errors_of(dense)}  # fmt: skip
        if rows:
            record["predictions"] = [
                {"row_id": s.row.row_id, "source": s.row.source, "seconds": s.row.seconds,
                 "predicted_seconds": s.seconds, "memory_gb": s.row.memory_gb, "predicted_memory_gb": s.memory_gb,
                 "p_out_of_memory": s.p_oom}
                for s in self.scored
            ]  # fmt: skip
        return record


def validate(file: Path, calibration_files: Sequence[Path], leave_out: str | None = None) -> Validation:
    """Predict the rows of ``file`` and compare them with their measurements.

    The options determine the constants:

    - With ``calibration_files``, the constants are fitted to these files, without rows that are also in ``file``.
    - If ``leave_out`` is "source" or "machine", the rows of each source or machine are predicted with constants that
      are fitted to all other rows of ``file``.
    - With neither option, the constants come from the machine's file. If the file has no constants, they come from the
      calibration that comes with fourfold.

    The rows are also predicted with unfitted constants.

    Raises:
        UserError: Both options are given, a file is invalid, ``leave_out`` needs more sources or machines, or there are
            no rows to predict or to fit.
    """
    if calibration_files and leave_out is not None:
        raise UserError("--calibrate-on and --leave-out contradict each other; give only one of them")
    constants, calibration = "shipped with fourfold", shipped()
    rows, skipped = read_rows([file])
    if not rows:
        raise UserError(f"{file} has no row that can be predicted: {', '.join(skipped) or 'it is empty'}")
    if file == measured_table():
        constants += ", fitted to these rows"
    alone = predict_rows(rows, Calibration())
    if leave_out is not None:
        if len(set(map(KEYS[leave_out], rows))) < 2:
            raise UserError(f"--leave-out {leave_out} needs rows of at least two {leave_out}s; remove the option")
        return Validation(f"fitted to all other {leave_out}s", skipped, predict_left_out(rows, leave_out), alone)
    if calibration_files:
        with given_as("--calibrate-on"):
            others = held_out(read_rows(calibration_files)[0], rows)
        if not others:
            raise UserError("--calibrate-on: all rows in the given files are also rows to validate; give other rows")
        calibration = fit_rows(others)
        constants = f"fitted to {len(rows_to_fit(others))} rows"
    prefer_own = not calibration_files
    if prefer_own and any(is_calibrated(row.machine) for row in rows):
        constants += ", except on machines whose file has [efficiency]"
    return Validation(constants, skipped, predict_rows(rows, calibration, prefer_own), alone)


def held_out(rows: Sequence[Row], validated: Sequence[Row]) -> list[Row]:
    """Return the rows that are not among the rows to validate. Rows are the same if they have the same source and
    row_id."""
    known = {(row.source, row.row_id) for row in validated if row.row_id}
    return [row for row in rows if (row.source, row.row_id) not in known]
