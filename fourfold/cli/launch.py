"""`fourfold launch`: write the script that starts a run on a cluster."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option, Typer

from fourfold.cli.options import MACHINES, SITES, Overrides, RunFile
from fourfold.errors import UserError, given_as

if TYPE_CHECKING:
    from fourfold.config.run import RunConfig

launch = Typer(no_args_is_help=True, help="Write the script that starts a run on a cluster.")

Nodes = Annotated[int, Option(min=1, help="Number of nodes. Together they must have as many GPUs as the grid.")]
MACHINE_HELP = (
    "The planner's machine, for the checkpoint interval if the run file sets none. Default: metrics.machine, or the "
    f"site's machine. {MACHINES}"
)
Output = Annotated[
    Path | None, Option("--output", "--out", metavar="FILE", help="The file to write. Default: standard output.")
]
Setup = Annotated[Path | None, Option(metavar="FILE", help="Shell file that loads your modules and environment.")]
SaveSeconds = Annotated[
    int,
    Option(
        min=1, max=65535, help="Save this many seconds before the job ends. A step and a save must fit into this time."
    ),
]
MaxCrashes = Annotated[
    int, Option(min=0, help="Maximum restarts in a row after crashes. Restarts after a save are not limited.")
]


@launch.command()
def slurm(
    run_file: RunFile,
    site: Annotated[str, Option(help=f"{SITES}.")],
    nodes: Nodes,
    time: Annotated[str | None, Option(metavar="HH:MM:SS", help="Wall time.")] = None,
    machine: Annotated[str | None, Option(help=MACHINE_HELP)] = None,
    account: Annotated[str | None, Option(help="Account or project to charge.")] = None,
    partition: Annotated[str | None, Option(help="Partition (queue).")] = None,
    output: Output = None,
    setup: Setup = None,
    wrapper: Annotated[
        str | None, Option(metavar="WORDS", help="Words before `fourfold`, such as `singularity run image.sif`.")
    ] = None,
    sbatch: Annotated[list[str], Option(metavar="NAME=VALUE", help="Option of sbatch. Repeatable.")] = [],  # noqa: B006 (typer only reads it)
    srun: Annotated[list[str], Option(metavar="NAME=VALUE", help="Option of srun. Repeatable.")] = [],  # noqa: B006
    save_seconds: SaveSeconds = 300,
    max_crashes: MaxCrashes = 3,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a batch script for `sbatch`, with the conventions of a site.

    The job trains, saves before the wall time ends, and requeues itself until the run is done. It stops early after too
    many crashes in a row, or after an error that a restart would not fix, such as a mistake in the run file.

    Example: fourfold launch slurm RUN.toml --site frontier --nodes 64 --time 06:00:00 --account ABC123 --output job.sh
    """
    from fourfold.data.atomic_files import write_output
    from fourfold.launch.job_scripts.slurm_script import SlurmJob, render_slurm_script
    from fourfold.launch.job_scripts.slurm_site import load_site
    from fourfold.run_file.load import load_run

    setup_file = None if setup is None else str(setup)
    run, where = load_run(run_file, overrides), load_site(site)
    found = {"--machine": machine, "metrics.machine": run.metrics.machine, f"machine in {site}": where.machine}
    source, found_machine = next(((n, m) for n, m in found.items() if m), ("", None))
    changes, notes = _planned_interval(run, source, found_machine, time)
    limits = (save_seconds, max_crashes)
    job = SlurmJob(nodes, time, account, partition, sbatch, srun, setup_file, wrapper, *limits, [*overrides, *changes])
    script = render_slurm_script(str(run_file), run, where, job)
    for note in notes:
        print(note, file=sys.stderr)
    if output is None:
        print(script, end="")
    else:
        with given_as("--output"):
            write_output(output, script)


def _planned_interval(
    run: RunConfig, given_as: str, machine: str | None, time: str | None
) -> tuple[list[str], list[str]]:
    """Plan how often the job saves a checkpoint. Return a list of overrides, and then a list of notes for the user.

    If the run file sets no checkpoint interval and the machine is known, one override sets the best interval. The notes
    say how often the job saves. ``given_as`` is the option or key that named the machine.
    """
    from fourfold.launch.job_scripts.slurm_script import wall_seconds
    from fourfold.planning.checkpoint_interval import SavePlan, plan_saves
    from fourfold.planning.machines.machine import load_machine
    from fourfold.reports.numbers import counted
    from fourfold.reports.recorded_run import duration

    interval, notes = run.checkpoint.interval, []
    plan = SavePlan(interval, 0.0)
    if machine is not None and run.training.device != "cpu":
        planned_machine = load_machine(machine, given_as)
        try:
            plan = plan_saves(run, planned_machine)
        except UserError as error:
            notes.append(f"note: the planner cannot predict how long a step takes: {error}")
    if not plan.steps:
        notes.append(
            "warning: checkpoint.interval = 0 saves only when the run ends or is stopped, so a crash loses all "
            "steps; give --machine to let the planner choose an interval, or give for example --set "
            f"checkpoint.interval={max(1, run.training.train_steps // 20)}"
        )
        return [], notes
    between = f"{counted(plan.steps, 'step')} (about {duration(plan.seconds)})"
    if not interval:
        notes.append(
            f"note: the job saves a checkpoint every {between}, which loses the least time to failures on {machine}; "
            "--set checkpoint.interval=N sets another interval"
        )
    if time is not None and plan.seconds > (wall_seconds(time) or math.inf):
        notes.append(
            f"warning: --time {time} is shorter than the interval of {between} between checkpoints, so a crash loses "
            "all steps since the job started"
        )
    return [] if interval else [f"checkpoint.interval={plan.steps}"], notes
