"""Run training and audits on a grid from your own programs. The commands call the same functions."""

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

if TYPE_CHECKING:  # These modules import torch, which a process that only starts workers does not need.
    from fourfold.config.run import RunConfig
    from fourfold.memorization.audit_request import AuditRequest
    from fourfold.training.outcome import Outcome


def train(run: RunConfig, profile: bool = False, started: float | None = None) -> Outcome:
    """Train the model of a run file. `checkpoint.resume` determines whether the run resumes from a checkpoint.

    The function starts one local process for each rank of the grid, or joins the processes that torchrun or srun has
    started. Local processes import the program that starts them, so the program needs `if __name__ == "__main__":`. If
    a local process crashes or hangs, the run is restarted from the newest checkpoint, as set in [fault_tolerance].

    Args:
        run: The run file.
        profile: Whether to profile the third to the fifth step. The traces are in the folder `profile` of the run's
            folder.
        started: Unix time when the command started, to measure the start-up time (default: now).

    Returns:
        The outcome of this process, or the outcome of the first process if this function has started the processes.

    Raises:
        UserError: The run cannot start, or it diverges.
        WorkerFailed: A local process has crashed or hung, and the run was not restarted.
    """
    if run.metrics.machine is not None:
        # Report a wrong machine file before any process starts.
        load_machine(run.metrics.machine, "metrics.machine =")
    if read_environment(os.environ) is None:  # Without a launcher, all processes run on this machine.
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
            print(f"fourfold: {failure}\nfourfold: restarting. {where_it_continues(run)}", file=sys.stderr)
        else:
            break
    return outcome


def _may_restart(run: RunConfig, starts: int) -> bool:
    """Return whether a failed run may be restarted.

    Restarts must be enabled, the run must resume automatically, and the failed attempt must have begun to train. A run
    that fails before it begins to train would fail again.

    Args:
        run: The run file.
        starts: Number of recorded starts of training before the failed attempt.
    """
    began_to_train = count_starts(folder_of(run)) > starts
    return run.fault_tolerance.max_restarts > 0 and run.checkpoint.resume == "auto" and began_to_train


def audit(request: AuditRequest) -> dict[str, Any] | None:
    """Measure how much of a set of documents a model has memorized. By default, one process runs the model. To use a
    grid, set its axes in `request.overrides`.

    Args:
        request: The model, the documents, and the options.

    Returns:
        The record that `fourfold audit --json` prints. Under a launcher, None on all processes
        except the first.

    Raises:
        UserError: The model or the documents cannot be audited.
        WorkerFailed: A local process has crashed or hung.
    """
    from fourfold.memorization.scored_model import run_on_model_grid

    request.check()
    record: dict[str, Any] | None = run_on_model_grid("fourfold.memorization.audit:run_audit", request)
    return record
