"""fourfold train"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import Overrides, RunFile
from fourfold.exit_codes import STOPPED, ended_by
from fourfold.processes import lossy_output


@lossy_output(any_error=True)
def train(
    run_file: RunFile,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Record the third to the fifth step after the start: a trace of each process for ui.perfetto.dev "
            "and, for each axis, how long its collectives took and how much of that time computation hid.",
        ),
    ] = False,
) -> None:
    """Train a model described by a run file.

    Starts one local process for each rank of the grid, or joins the processes that torchrun or srun has started.
    Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1 save a checkpoint and stop with exit code 3. A second signal stops immediately,
    without saving (exit code 130 or 143). A job that hangs ends with exit code 4. Local processes that crash or hang
    are restarted, as set in [fault_tolerance].
    """
    from fourfold import jobs
    from fourfold.environment import read_environment
    from fourfold.processes import time_of_start
    from fourfold.run_file.load import load_run
    from fourfold.training.metrics import steps_taken
    from fourfold.training.run_folder import PROFILE_FILE, where_it_continues

    run = load_run(run_file, overrides)
    try:
        outcome = jobs.train(run, profile, time_of_start())
    except (KeyboardInterrupt, SystemExit) as end:
        place = read_environment(os.environ)
        if place is None or place.rank == 0:
            print(f"\nStopped. {where_it_continues(run)}", file=sys.stderr)
        if isinstance(end, SystemExit):
            raise
        raise typer.Exit(ended_by(signal.SIGINT)) from None
    if outcome.is_first_process:
        from fourfold.reports.profile_tables import profile_tables
        from fourfold.reports.run_report import write_run_report

        run_dir = Path(outcome.run_dir)
        if outcome.sample is not None:
            print(f"\nSample:\n{outcome.sample}\n")
        if profile:
            profile_tables(run_dir / PROFILE_FILE)
        if steps_taken(run_dir):
            print(f"Report: {write_run_report(run_dir)}")
    if outcome.stopped:
        if outcome.is_first_process:
            print(f"Stopped. {where_it_continues(run)}")
        raise typer.Exit(STOPPED)
