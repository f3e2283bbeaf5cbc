"""fourfold launch"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fourfold.cli.options import SITES, Overrides, RunFile
from fourfold.errors import given_as

launch = typer.Typer(no_args_is_help=True, help="Write the script that starts a run on a cluster.")

Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes. Together they must have as many GPUs as the grid.")]
Output = Annotated[
    Path | None, typer.Option("--output", "--out", metavar="FILE", help="The file. Default: standard output.")
]
Setup = Annotated[Path | None, typer.Option(metavar="FILE", help="Shell file that loads your modules and environment.")]
SaveSeconds = Annotated[
    int,
    typer.Option(min=1, max=65535, help="Save this many seconds before the job ends. A step and a save must fit in."),
]
MaxCrashes = Annotated[
    int, typer.Option(min=0, help="Maximum restarts in a row after crashes. Restarts after a save are not limited.")
]


@launch.command()
def slurm(
    run_file: RunFile,
    site: Annotated[str, typer.Option(help=f"{SITES}.")],
    nodes: Nodes,
    time: Annotated[str | None, typer.Option(metavar="HH:MM:SS", help="Wall time.")] = None,
    account: Annotated[str | None, typer.Option(help="Account or project that pays.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition (queue).")] = None,
    output: Output = None,
    setup: Setup = None,
    wrapper: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Words before `fourfold`, such as `singularity run image.sif`.")
    ] = None,
    sbatch: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Option of sbatch. Repeatable.")] = [],  # noqa: B006 (typer only reads it)
    srun: Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="Option of srun. Repeatable.")] = [],  # noqa: B006
    save_seconds: SaveSeconds = 300,
    max_crashes: MaxCrashes = 3,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Write a batch script for `sbatch`, with the conventions of a site.

    The job trains, saves before the wall time ends, and submits itself again until the run is done. If the run file has
    a mistake, the job stops.

    Example: fourfold launch slurm RUN.toml --site frontier --nodes 64 --time 06:00:00 --account ABC123 --output job.sh
    """
    from fourfold.data.atomic_files import write_output
    from fourfold.launch.job_scripts.slurm_script import SlurmJob, render_slurm_script
    from fourfold.launch.job_scripts.slurm_site import load_site
    from fourfold.run_file.load import load_run

    setup_file = None if setup is None else str(setup)
    limits = (save_seconds, max_crashes)
    job = SlurmJob(nodes, time, account, partition, sbatch, srun, setup_file, wrapper, *limits, overrides)
    run = load_run(run_file, overrides)
    script = render_slurm_script(str(run_file), run, load_site(site), job)
    if not run.checkpoint.interval:
        print(
            "warning: checkpoint.interval = 0 saves only when the run ends or is stopped, and a crash loses all steps "
            f"since then; set for example --set checkpoint.interval={max(1, run.training.train_steps // 20)}",
            file=sys.stderr,
        )
    if output is None:
        print(script, end="")
    else:
        with given_as("--output"):
            write_output(output, script)
