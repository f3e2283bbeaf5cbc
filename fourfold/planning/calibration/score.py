"""Score predictions against measured rows: errors by source, rankings within sweeps, and memory. A *row* is one
measured run. A *sweep* is a group of rows that differ only in layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.array_fields import stack
from fourfold.planning.calibration.fit import Calibration, fit
from fourfold.planning.calibration.machine_constants import constants_for, is_calibrated, kind_of_step, shipped_interval
from fourfold.planning.calibration.rows import Row
from fourfold.planning.cost.memory import peak_memory
from fourfold.planning.cost.out_of_memory import p_out_of_memory
from fourfold.planning.cost.step import step_parts

MIN_SWEEP, MIN_RANKED = 3, 8
"""A sweep's regret (see ``sweeps_of``) is computed from at least ``MIN_SWEEP`` rows, and its rank correlation from at
least ``MIN_RANKED`` rows."""

KEYS: dict[str, Callable[[Row], str]] = {"source": lambda row: row.source, "machine": lambda row: row.machine.name}
"""For each way to group rows, a function that returns the name of a row's group, for ``predict_left_out``."""

Statistics = dict[str, float | int | None]
"""Counts, errors, and correlations, by name. An error or a correlation is None if there are no rows to compute it
from."""


@dataclass(frozen=True)
class Scored:
    """A measured row, with its predicted step seconds and its predicted memory in 10⁹ bytes."""

    row: Row
    seconds: float
    memory_gb: float
    p_oom: float
    """Probability of running out of memory."""
    kind: str
    """Which interval applies to the predicted seconds (``machine_constants.kind_of_step``)."""

    @property
    def error(self) -> float | None:
        """Return the relative error of the predicted step time, or None if the step was not measured."""
        return None if self.row.seconds is None else self.seconds / self.row.seconds - 1


def rows_to_fit(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of dense models that have a step time and are not doubtful."""
    return [row for row in rows if row.seconds is not None and not row.doubt and not row.mixture]


def fit_rows(rows: Sequence[Row], known: bool = True) -> Calibration:
    """Fit the constants to the rows that ``rows_to_fit`` returns.

    Args:
        rows: Measured rows.
        known: Whether to also fit the fourth level, for each source on each machine (``fit.fit``).

    Raises:
        UserError: ``rows_to_fit`` returns no rows.
    """
    timed = rows_to_fit(rows)
    if not timed:
        raise UserError("no row to calibrate on has a dense model and a step time; give step_seconds")
    work, machine = stack([row.work for row in timed]), stack([row.machine for row in timed])
    names = [row.machine.name for row in timed], [row.source for row in timed]
    return fit(work, machine, np.array([row.seconds for row in timed]), *names, known)


def predict_rows(rows: Sequence[Row], calibration: Calibration, prefer_own: bool = False) -> list[Scored]:
    """Predict the step time and memory of every row.

    Args:
        rows: Measured rows.
        calibration: The constants to predict with.
        prefer_own: Whether the constants in a machine's file, if it has any, replace the constants in ``calibration``.
    """
    if not rows:
        return []
    work, machine = stack([row.work for row in rows]), stack([row.machine for row in rows])
    constants = stack(
        [
            constants_for(row.machine)
            if prefer_own and is_calibrated(row.machine)
            else calibration.constants(row.machine.name, row.source)
            for row in rows
        ]
    )
    parts = step_parts(work, machine, constants)
    memory = peak_memory(work, machine)
    p_oom = p_out_of_memory(memory, work, machine)
    seconds, launch, memory_gb, p_oom = (
        np.broadcast_to(values, len(rows)).tolist()
        for values in (sum(parts.values()), parts["launch"], memory / 1e9, p_oom)
    )
    kinds = [kind_of_step(row.work, waits / total) for row, waits, total in zip(rows, launch, seconds, strict=True)]
    return list(map(Scored, rows, seconds, memory_gb, p_oom, kinds))


def left_out_fits(rows: Sequence[Row], by: str) -> dict[str, Calibration]:
    """For each source (or machine), return constants fitted to the rows of all other sources (or machines)."""
    key = KEYS[by]
    names = dict.fromkeys(map(key, rows))
    return {name: fit_rows([row for row in rows if key(row) != name], known=False) for name in names}


def predict_left_out(
    rows: Sequence[Row], by: str, known_source: bool = True, fits: dict[str, Calibration] | None = None
) -> list[Scored]:
    """Predict the rows of each source (or machine) with constants fitted to the rows of all other sources (or
    machines).

    Args:
        rows: Measured rows.
        by: "source" or "machine".
        known_source: If False, predict every row as if its source were new. By default, a prediction for a machine may
            use the rows that the same source has on other machines.
        fits: The results of ``left_out_fits``, if they are already known.
    """
    scored: list[Scored] = []
    for name, fitted in (fits or left_out_fits(rows, by)).items():
        own = [row for row in rows if KEYS[by](row) == name]
        found = predict_rows(own if known_source else [replace(row, source="") for row in own], fitted)
        scored += [replace(s, row=row) for s, row in zip(found, own, strict=True)]
    return scored


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the scores of the rows as JSON values.

    The totals and the errors by source include only dense rows (``Row.dense_half``). Doubtful measurements are scored
    as "doubtful", MoE models as "mixtures", and all remaining rows as "others".
    """
    mixtures = [s for s in scored if s.row.mixture]
    scored = [s for s in scored if not s.row.mixture]
    timed = [s for s in scored if s.error is not None]
    dense = [s for s in timed if s.row.dense_half]
    doubtful = [s for s in timed if s.row.doubt]
    timed_mixtures = [s for s in mixtures if s.error is not None and not s.row.doubt]
    others = [s for s in timed if not s.row.dense_half and not s.row.doubt]
    return {
        **_errors_by_source(dense),
        "others": {"rows": len(others), **errors_of(others)},
        "doubtful": errors_of(doubtful),
        "mixtures": {**_errors_by_source(timed_mixtures), "memory": memory_of(mixtures)},
        "sweeps": sweeps_of(dense),
        "memory": memory_of(scored),
    }


def _errors_by_source(scored: Sequence[Scored]) -> dict[str, Any]:
    sources = sorted({s.row.source for s in scored})
    by_source = {source: errors_of([s for s in scored if s.row.source == source]) for source in sources}
    return {"rows": len(scored), **errors_of(scored), "by_source": by_source}


def errors_of(scored: Sequence[Scored]) -> Statistics:
    """Return statistics of the errors of predicted step times, by name. Every row must have a measured step time.

    The entries are the number of rows, three statistics of the absolute relative errors (median, mean, and maximum),
    the mean signed error (bias), and the fraction of rows inside the 90 % interval.
    """
    if not scored:
        return {"count": 0, **dict.fromkeys(("median_abs_error", "mean_abs_error", "max_abs_error", "bias",
                                             "inside_interval"))}  # fmt: skip
    errors = np.array([s.error for s in scored])
    factors = [shipped_interval(s.row.machine, s.kind, s.row.work) for s in scored]
    inside = [f[0] <= 1 / (1 + error) <= f[1] for f, error in zip(factors, errors, strict=True) if f is not None]
    return {
        "count": len(errors),
        "median_abs_error": float(np.median(np.abs(errors))),
        "mean_abs_error": float(np.abs(errors).mean()),
        "max_abs_error": float(np.abs(errors).max()),
        "bias": float(errors.mean()),
        "inside_interval": float(np.mean(inside)) if inside else None,
    }


def sweeps_in(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Group rows into sweeps. The rows of one sweep differ only in layout."""
    sweeps: dict[tuple[str, ...], list[Scored]] = {}
    for s in scored:
        sweeps.setdefault(s.row.sweep, []).append(s)
    return list(sweeps.values())


def sweeps_of(scored: Sequence[Scored]) -> Statistics:
    """Score how well predictions rank the rows of each sweep, by regret and by Spearman's rank correlation.

    The *regret* of a sweep says what it costs to trust the predictions. The regret is the measured time of the row that
    is predicted to be fastest, divided by the shortest measured time, minus 1.
    """
    regrets, correlations = [], []
    for sweep in sweeps_in(scored):
        measured = np.array([s.row.seconds for s in sweep])
        predicted = np.array([s.seconds for s in sweep])
        if len(sweep) < MIN_SWEEP or np.ptp(measured) == 0:
            continue
        regrets.append(measured[predicted.argmin()] / measured.min() - 1)
        if len(sweep) >= MIN_RANKED:
            correlations.append(np.corrcoef(_ranks(measured), _ranks(predicted))[0, 1])
    return {
        "count": len(regrets),
        "regret_mean": float(np.mean(regrets)) if regrets else None,
        "regret_max": float(np.max(regrets)) if regrets else None,
        "ranked": len(correlations),
        "spearman_median": float(np.median(correlations)) if correlations else None,
        "spearman_min": float(np.min(correlations)) if correlations else None,
    }


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return each value's position in ascending order, starting at 0. Tied values get the mean of their positions."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") - 1) / 2


def memory_of(scored: Sequence[Scored]) -> Statistics:
    """Score the predicted memory.

    The scores are:
    - the mean absolute relative error, and the mean relative error (bias)
    - the OOM recall: of the rows that ran out of memory, the fraction that was predicted to run out
    - the fit recall: of the rows that fit into memory, the fraction that was predicted to fit
    """
    errors = [s.memory_gb / s.row.memory_gb - 1 for s in scored if s.row.memory_gb is not None]
    out = [s.p_oom > 0.5 for s in scored if s.row.out_of_memory]
    fitting = [s.p_oom <= 0.5 for s in scored if s.row.ran]
    return {
        "rows": len(errors),
        "mean_abs_error": float(np.abs(errors).mean()) if errors else None,
        "bias": float(np.mean(errors)) if errors else None,
        "out_of_memory_rows": len(out),
        "oom_recall": float(np.mean(out)) if out else None,
        "fitting_rows": len(fitting),
        "fit_recall": float(np.mean(fitting)) if fitting else None,
    }
