"""Predict a run of another training program, and find the best layout in that program."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.planning.calibration.columns import MeasuredRow
from fourfold.planning.calibration.machine_constants import constants_for, shipped, shipped_interval
from fourfold.planning.calibration.rows import Row, Skipped, measured_table, read_rows, row_of
from fourfold.planning.calibration.score import fit_rows, predict_rows
from fourfold.planning.machines.machine import Machine
from fourfold.planning.machines.write import with_constants
from fourfold.planning.other_programs.program_settings import TABLES, read_program
from fourfold.planning.search.limits import parse_limits
from fourfold.planning.search.plan import Prediction, make_plan

SOURCE = "--measured"
"""Name of the source of the user's measured step among the rows that the constants are fitted to."""


@dataclass(frozen=True)
class OtherRun:
    """A run of another training program."""

    row: MeasuredRow
    """The run as a row of a table of measured runs (docs/measured-rows.md)."""
    model: ModelConfig
    """The model, as fourfold trains it."""
    lists: dict[str, list[str]]
    """Lists of settings, by how each setting was read (see ``program_settings.read_program``)."""
    own: Row
    """The row, converted to a workload with the run's own layout."""
    machine: Machine
    """The machine that the run uses. If there is a measured step, the machine's constants are fitted to this step and
    to the published measured rows."""
    predicted: float
    """Predicted seconds of a step. This prediction does not use the measured step."""
    interval: tuple[float, float] | None
    """Two factors. ``predicted`` times these factors is the 5th and the 95th percentile of the measured seconds. None
    on a machine that the user calibrated."""

    def record(self) -> dict[str, Any]:
        """Return the settings and the prediction as JSON values."""
        return {**self.lists, "program": self.row.program, "measured_seconds": self.row.step_seconds,
                "predicted_seconds": self.predicted, "interval_factors": self.interval}  # fmt: skip


def read_other_run(path: Path, given: Mapping[str, str], model: ModelConfig | None) -> OtherRun:
    """Read and predict a run of another program.

    Args:
        path: Path of the other program's configuration.
        given: Values by column of a measured row. They replace the values from the file. The column ``step_seconds`` is
            the user's measured step time.
        model: The model. Default: the sizes in the file, or the preset with the model's name.

    Raises:
        UserError: The file or the machine is invalid, or the planner cannot predict the run.
    """
    row, model, lists = read_program(path, given, model)
    try:
        own = row_of(row.model_copy(update={"step_seconds": row.step_seconds or 1.0}))
    except Skipped as reason:
        problem = f"the planner cannot predict this run on {row.gpus:g} GPUs ({reason})"
        raise UserError(f"--from {path}: {problem}; change the file, or give another number of --gpus") from None
    predicted, machine = predict_rows([own], shipped(), prefer_own=True)[0], own.machine
    if row.step_seconds:
        rows = [*read_rows([measured_table()])[0], replace(own, source=SOURCE, mixture=False)]
        machine = with_constants(machine, machine.name, fit_rows(rows).logs(machine.name, SOURCE), {})
    interval = shipped_interval(own.machine, predicted.kind, own.work)
    return OtherRun(row, model, lists, own, machine, predicted.seconds, interval)


def best_in_program(
    run: OtherRun, limits: Sequence[str], watch: Callable[[int, int], None] | None = None
) -> Prediction | None:
    """Return the fastest layout that the run's program supports for this model and batch, or None if no layout fits.

    Args:
        run: The run, as ``read_other_run`` returns it.
        limits: Limits of the search, in the format of ``limits.parse_limits``.
        watch: Called during the search with two numbers: evaluated layouts, and all legal layouts.
    """
    found, row = list[Prediction](), run.row.model_copy(update={"step_seconds": 1.0})
    for search in TABLES["search"][row.program]:
        with suppress(UserError):  # No layout fits, or the user's limits contradict the program's limits.
            within = parse_limits([*search["limits"], *(search.get("of_experts", []) if row.experts else []), *limits])
            recomputes = tuple(each for each in within.recomputes if not each[2])  # Only fourfold offloads inputs.
            within = replace(within, recomputes=recomputes, cp_methods=(row.cp_method,))
            work = row_of(row.model_copy(update=search["columns"])).work.but(end_layers=0.0)
            found.append(make_plan(work, run.machine, constants_for(run.machine), int(row.gpus), 1, within, watch).best)
    return min(found, key=lambda layout: layout.seconds, default=None)
