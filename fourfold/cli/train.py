"""`fourfold train`: train a model from a run file, or from a model and data."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from fourfold.cli.options import Overrides
from fourfold.errors import UserError
from fourfold.exit_codes import STOPPED, ended_by
from fourfold.processes import lossy_output

if TYPE_CHECKING:
    from fourfold.config.run import RunConfig

_instead = partial(Option, rich_help_panel="Options instead of a run file")
"""Call this in place of ``Option`` to define an option for training without a run file."""


MODEL_HELP = "A preset, such as llama-12m, or a Hugging Face model to fine-tune."
DATA_HELP = "A folder, a file, or another input of `fourfold prepare`. Or a prepared corpus."
PROCESSES_HELP = "Number of processes. Default: one for each GPU, or one on a CPU."
STEPS_HELP = "Number of steps. Default: up to 4 passes over the data, or 1 for a Hugging Face model."


@lossy_output(any_error=True)
def train(
    run_file: Annotated[Path | None, Argument(metavar="[RUN.toml]", help="The run file.")] = None,
    model: Annotated[str | None, _instead(metavar="PRESET|DIR|ID", help=MODEL_HELP)] = None,
    data: Annotated[str | None, _instead(metavar="INPUT|CORPUS", help=DATA_HELP)] = None,
    processes: Annotated[int | None, _instead(min=1, max=4096, help=PROCESSES_HELP)] = None,
    steps: Annotated[int | None, _instead(min=1, help=STEPS_HELP)] = None,
    overrides: Overrides = [],  # noqa: B006 (typer only reads it)
    profile: Annotated[
        bool,
        Option(
            "--profile",
            help="Record steps 3 to 5 after the start. Writes a trace of each process for ui.perfetto.dev, and prints "
            "how long the collectives of each axis took, and how much of this time computation hid.",
        ),
    ] = False,
) -> None:
    """Train a model described by a run file, or by --model and --data.

    Starts one local process for each rank of the grid, or joins the processes that torchrun or srun has started.
    Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1 save a checkpoint and stop with exit code 3. A second Ctrl-C or SIGTERM stops
    immediately, without saving (exit code 130 or 143). A job that hangs ends with exit code 4. Local processes that
    crash or hang are restarted, as set in [fault_tolerance].

    With --model and --data, the command first tokenizes the data, chooses the grid and all other settings, and prints
    them as a run file.

    Example: fourfold train --model llama-12m --data text/ --processes 4
    """
    from fourfold import jobs
    from fourfold.environment import read_environment
    from fourfold.processes import time_of_start
    from fourfold.training.metrics import steps_taken
    from fourfold.training.run_folder import PROFILE_FILE, where_it_continues

    instead = {"model": model, "data": data, "processes": processes, "steps": steps}
    run = _run_to_train(run_file, instead, overrides)
    try:
        outcome = jobs.train(run, profile, time_of_start())
    except (KeyboardInterrupt, SystemExit) as end:
        place = read_environment(os.environ)
        if place is None or place.rank == 0:
            print(f"\nStopped. {where_it_continues(run)}", file=sys.stderr)
        if isinstance(end, SystemExit):
            raise
        raise Exit(ended_by(signal.SIGINT)) from None
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
        raise Exit(STOPPED)


def _run_to_train(run_file: Path | None, instead: dict[str, Any], overrides: list[str]) -> RunConfig:
    """Return the run to train. If there is a run file, load it. Otherwise, choose a run for the options in ``instead``,
    and print it as a run file."""
    given = [option for option, value in instead.items() if value is not None]
    if run_file is not None:
        from fourfold.run_file.load import load_run

        if given:
            raise UserError(f"--{given[0]} is for training without a run file; leave out --{given[0]} or {run_file}")
        return load_run(run_file, overrides)
    if instead["model"] is None or instead["data"] is None:
        missing = "RUN.toml" if not given else "--data" if instead["data"] is None else "--model"
        raise UserError(f"{missing} is missing for `train`; for example fourfold train --model llama-12m --data text/")
    from fourfold.environment import read_environment
    from fourfold.training.run_folder import RUN_FILE, folder_of
    from fourfold.tuning.run_for_data import run_for_data

    if read_environment(os.environ) is not None:
        raise UserError("torchrun and srun need a run file; use `fourfold prepare` first, and name the corpus in it")
    run, text = run_for_data(**instead, overrides=overrides)
    print(f"Run file ({folder_of(run) / RUN_FILE} has it with all defaults):\n\n{text}", flush=True)
    return run
