"""`fourfold tune`: find the fastest layout of a run with real trials."""

import math
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Exit, Option, echo

from fourfold.cli.options import KNOBS, MACHINES, SITES, AsJson, Overrides, RunFile, show
from fourfold.data.progress import working
from fourfold.errors import UserError
from fourfold.exit_codes import ended_by


def tune(
    run_file: RunFile,
    trials: Annotated[
        int, Option(min=1, help="Number of trials in total, including trials of an interrupted search.")
    ] = 20,
    out: Annotated[
        Path | None, Option(metavar="FOLDER", help="The search's folder. Default: tune-NAME.", show_default=False)
    ] = None,
    budget: Annotated[float | None, Option(metavar="MINUTES", help="Start no new trial after this time.")] = None,
    space: Annotated[
        list[str],
        Option(
            metavar="KNOB=VALUE,…", help=f"Values of a knob, as `pp=1,2` or `x<=4`; repeatable. Default: all. {KNOBS}"
        ),
    ] = [],  # noqa: B006 (typer only reads it)
    nproc: Annotated[int | None, Option(min=1, help="Number of devices per trial. Default: the run file's.")] = None,
    machine: Annotated[
        str | None, Option(help=f"The planner's machine. Default: metrics.machine, or laptop (CPU). {MACHINES}")
    ] = None,
    steps: Annotated[int, Option(min=2, help="Measured steps per trial, after three warm-up steps.")] = 8,
    timeout: Annotated[float, Option(min=1, help="A trial counts as hung after this many seconds.")] = 600,
    memory_limit: Annotated[
        float | None, Option(metavar="GB", min=0.001, help="Limit per device, or per process on a CPU.")
    ] = None,
    at_once: Annotated[
        int | None, Option(min=1, help="Concurrent trials. Default: as many as the machine's GPUs allow.")
    ] = None,
    slurm: Annotated[str | None, Option(metavar="SITE", help=f"Run trials as SLURM jobs on: {SITES}.")] = None,
    nodes: Annotated[int, Option(min=1, help="With --slurm: nodes per job.")] = 1,
    time: Annotated[str | None, Option(metavar="HH:MM:SS", help="With --slurm: wall time per job.")] = None,
    sbatch: Annotated[list[str], Option(metavar="NAME=VALUE", help="Option of sbatch. Repeatable.")] = [],  # noqa: B006
    setup: Annotated[Path | None, Option(metavar="FILE", help="With --slurm: file that loads modules.")] = None,
    seed: Annotated[int, Option(help="Seed of the search's random choices.")] = 0,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Find the fastest layout of a run: try layouts for a few real steps each, the most promising ones first.

    Writes into the search's folder: best.toml (the run file with the fastest layout), machine.toml (the calibrated
    machine file), tune.json (the results), and the trials. The same command continues a search that was interrupted.

    Example: fourfold tune RUN.toml --trials 12 --space pp=1,2 --machine mine.toml
    """
    from fourfold.launch.job_scripts.slurm_script import SlurmJob
    from fourfold.reports.tune_report import tune_tables
    from fourfold.tuning.start_search import search_for
    from fourfold.tuning.tune_record import finish
    from fourfold.tuning.tuner import Settings

    if slurm is None and (nodes > 1 or time or sbatch or setup):
        raise UserError("--nodes, --time, --sbatch, and --setup need --slurm SITE, such as --slurm generic")
    for name, value in {"--budget": budget, "--timeout": timeout, "--memory-limit": memory_limit}.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"{name} {value} is not a finite number; leave it out for no limit")
    limit = None if memory_limit is None else memory_limit * 1e9
    settings = Settings(trials, budget, at_once or 0, steps, timeout, limit, seed)
    job = None if slurm is None else SlurmJob(nodes, time, sbatch=sbatch, setup=None if setup is None else str(setup))
    search, base = search_for(
        run_file,
        overrides=overrides,
        nproc=nproc,
        machine_name=machine,
        space=space,
        folder=out,
        settings=settings,
        site=slurm,
        job=job,
        report=lambda line: print(line, file=sys.stderr),
    )
    try:
        with working("Trying layouts"):
            end = search.run()
    except KeyboardInterrupt:
        echo(f"\nStopped. The trials are in {search.folder}; the same command continues.", err=True)
        raise Exit(ended_by(signal.SIGINT)) from None
    result = finish(search, base, end)
    show(asdict(result), as_json, lambda _: tune_tables(result))
