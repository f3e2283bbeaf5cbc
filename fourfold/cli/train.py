"""fourfold train"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from fourfold.cli.options import Overrides, RunFile

STOPPED = 3
INTERRUPTED = 130
"""The code by which shells report a process that Ctrl-C has ended."""


def train(run_file: RunFile, overrides: Overrides = []) -> None:  # noqa: B006 (typer reads it, nobody writes it)
    """Train a model described by a run file.

    Starts one local process for each place of the grid, or joins those that torchrun or srun has started. Ctrl-C,
    SIGTERM, SIGHUP and SIGUSR1 save a checkpoint and stop with exit code 3; a second Ctrl-C does not wait (130).
    """
    from fourfold import jobs
    from fourfold.environment import read_environment
    from fourfold.run_file.load import load_run
    from fourfold.training.run_folder import where_it_continues

    run = load_run(run_file, overrides)
    try:
        outcome = jobs.train(run)
    except KeyboardInterrupt:
        place = read_environment(os.environ)
        if place is None or place.rank == 0:
            print(f"\nStopped. {where_it_continues(run)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if outcome.is_first_process:
        from fourfold.reports.run_report import write_run_report

        if outcome.sample is not None:
            print(f"\nSample:\n{outcome.sample}\n")
        print(f"Report: {write_run_report(Path(outcome.run_dir))}")
    if outcome.stopped:
        if outcome.is_first_process:
            print(f"Stopped by a signal. {where_it_continues(run)}")
        raise typer.Exit(STOPPED)
