"""fourfold train"""

from __future__ import annotations

import typer

from fourfold.cli.options import Overrides, RunFile

STOPPED = 3


def train(run_file: RunFile, overrides: Overrides = []) -> None:  # noqa: B006 (typer reads it, nobody writes it)
    """Train a model as a run file says.

    Starts one local process for each place of the grid, or joins those that torchrun or srun has started. Exit code 3:
    stopped by SIGTERM or SIGUSR1 after saving a checkpoint.
    """
    from fourfold.launch.job_processes import run_on_grid
    from fourfold.run_file.load import load_run

    run = load_run(run_file, overrides)
    if run.metrics.machine is not None:
        from fourfold.planning.machines.machine import load_machine

        load_machine(run.metrics.machine)  # every process refuses what is wrong in it, before any has started
    callbacks = ["fourfold.memorization.in_training:CanaryAudit"] if run.audit.interval else []
    outcome = run_on_grid(
        "fourfold.training.loop:train", [run, callbacks], run.parallel.world_size, wanted_device=run.training.device
    )
    if outcome.is_first_process:
        from fourfold.reports.run_report import write_run_report

        if outcome.sample is not None:
            print(f"\nSample:\n{outcome.sample}\n")
        print(f"Report: {write_run_report(outcome.run_dir)}")
    if outcome.stopped:
        raise typer.Exit(STOPPED)
