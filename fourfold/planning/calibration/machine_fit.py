"""Fit a machine's constants to the user's own measurements, and cross-validate them. A *row* is one measured run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.calibration.fit import Calibration
from fourfold.planning.calibration.machine_constants import range_features
from fourfold.planning.calibration.measured_run import RUN_SOURCE, row_of_run
from fourfold.planning.calibration.rows import read_rows
from fourfold.planning.calibration.score import Statistics, errors_of, fit_rows, predict_rows, rows_to_fit
from fourfold.planning.machines.machine import Machine
from fourfold.planning.machines.names import machine_names
from fourfold.planning.machines.write import with_constants

FOLDS = 5
"""Number of folds of the cross-validation."""


@dataclass(frozen=True)
class FittedMachine:
    """A machine with fitted constants, and the quality of the fit."""

    machine: Machine
    rows: int
    """Number of rows in the fit."""
    skipped: dict[str, list[str]]
    """Names of skipped rows, by reason."""
    before: Statistics
    """Prediction errors on all rows before the fit, with the medians of the priors as constants."""
    held_out: Statistics
    """Cross-validation errors: each fold is predicted with constants fitted to the other folds."""


def fit_machine(paths: Sequence[Path], base: Machine, name: str, seed: int = 0) -> FittedMachine:
    """Fit a machine's constants to measurements.

    Args:
        paths: Tables of rows (.csv), and metrics of runs (metrics.jsonl, with run.toml in the same folder).
        base: The machine as its file describes it.
        name: Name of the fitted machine.
        seed: Seed of the folds of the cross-validation.

    Returns:
        The machine with fitted constants, and the prediction errors before the fit and on held-out rows.

    Raises:
        UserError: A file cannot be read or is invalid, there is no row to fit to, or a row is from a machine other than
            ``base``.
    """
    rows, skipped = read_rows([path for path in paths if path.suffix == ".csv"])
    rows += [row_of_run(path, base) for path in paths if path.suffix != ".csv"]
    # A machine file that the user gives describes the machine of all rows, even if the rows name another machine.
    own = base.name not in machine_names()
    rows = [replace(row, machine=base) if own or row.source == RUN_SOURCE else row for row in rows]
    rows = [replace(row, source=name) if row.source == RUN_SOURCE else row for row in rows]
    if mixtures := [row.row_id for row in rows if row.mixture]:
        skipped["no constant is fitted to mixtures of experts"] = mixtures
    rows = rows_to_fit(rows)
    if others := sorted({row.machine.name for row in rows} - {base.name}):
        raise UserError(
            f"the rows are from {' and '.join(others)}, but --machine is {base.name}; calibrate one machine at a "
            f"time, with --machine {others[0]}"
        )
    if not rows:
        why = ", ".join(skipped) or "the files are empty"
        raise UserError(f"there is no row of a dense model with a step time: {why}")
    calibration = fit_rows(rows)
    before = [s for s in predict_rows(rows, Calibration()) if s.error is not None]
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = []
    for fold in range(min(FOLDS, len(rows)) if len(rows) > 1 else 0):
        out = set(order[fold::FOLDS].tolist())
        fitted = fit_rows([row for i, row in enumerate(rows) if i not in out])
        held_out += predict_rows([rows[i] for i in sorted(out)], fitted)
    # The fit has factors for all machines, for this machine, and for the source of the rows. If all rows have the same
    # source, only the product of the factors is known, so write the product to the machine file.
    sources = {row.source for row in rows}
    logs = calibration.logs(base.name, sources.pop() if len(sources) == 1 else "")
    values = [range_features(row.work) for row in rows]
    extent = {key: (min(v[key] for v in values), max(v[key] for v in values)) for key in values[0]}
    return FittedMachine(
        with_constants(base, name, logs, extent), len(rows), skipped, errors_of(before), errors_of(held_out)
    )
