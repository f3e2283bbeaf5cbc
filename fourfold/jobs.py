"""Jobs that run on a grid, as functions for programs of your own; the commands call the same functions."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from fourfold.environment import read_environment
from fourfold.launch.job_processes import run_on_grid
from fourfold.launch.local_workers import WorkerFailed
from fourfold.planning.machines.machine import load_machine
from fourfold.training.attempts import count_starts
from fourfold.training.machine_memory import check_machine_memory
from fourfold.training.run_folder import folder_of, where_it_continues

if TYPE_CHECKING:  # these import torch, which the parent of local workers does not need
    from fourfold.config.run import RunConfig
    from fourfold.memorization.audit import AuditRequest
    from fourfold.training.outcome import Outcome


def train(run: RunConfig, profile: bool = False, started: float | None = None) -> Outcome:
    """Train a model as a run file says, and resume where ``checkpoint.resume`` points.

    profile: record the third to the fifth step after the start, in the folder ``profile`` of the run's folder. started:
    when the command was started, by the clock of ``time.time``, for the figure of start-up; None: now.

    Starts one local process for each place of the grid, or joins those that torchrun or srun has started. Local
    processes import the program that starts them, so it needs ``if __name__ == "__main__":``.

    Local workers that crash or hang are started again, from the newest checkpoint, as [fault_tolerance] says.

    Returns this process's outcome; where the processes were started here, that of the first one. Raises ``UserError``
    for a run that cannot start or that diverges.
    """
    if run.metrics.machine is not None:
        load_machine(run.metrics.machine)  # errors in it are raised before any process starts
    if read_environment(os.environ) is None:  # all processes are this machine's
        check_machine_memory(run)
    for restarts in itertools.count():
        began, starts = time.time(), count_starts(folder_of(run))
        try:
            outcome: Outcome = run_on_grid(
                "fourfold.train_with_callbacks:train_with_callbacks",
                [run, profile],
                run.parallel.world_size,
                wanted_device=run.training.device,
                timeout=run.fault_tolerance.group_timeout,
                heeds_stop_signals=True,
                restarts=restarts,
                started=began if restarts or started is None else started,
            )
        except WorkerFailed as failure:
            if not _may_restart(run, starts):
                raise
            print(f"fourfold: {failure}\nfourfold: starting again; {where_it_continues(run)}", file=sys.stderr)
        else:
            break
    return outcome


def _may_restart(run: RunConfig, starts: int) -> bool:
    """True if the attempt had begun to train, after ``starts`` recorded starts; what fails before that fails again."""
    began_to_train = count_starts(folder_of(run)) > starts
    return run.fault_tolerance.max_restarts > 0 and run.checkpoint.resume == "auto" and began_to_train


def audit(request: AuditRequest) -> dict[str, Any] | None:
    """Measure what a model has memorized of documents, on the grid of the model's own run file.

    Returns the record that ``fourfold audit --json`` prints, or None on processes of a launcher but the first. Raises
    ``UserError`` for a model or documents that cannot be audited.
    """
    from fourfold.memorization.scored_model import run_on_model_grid

    request.check()
    record: dict[str, Any] | None = run_on_model_grid("fourfold.memorization.audit:run_audit", request)
    return record
