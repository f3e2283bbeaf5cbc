"""Write a batch script that trains a run on a SLURM cluster. The script is made from the template `slurm.sh` and the
cluster's conventions."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from fourfold.config.run import AXES, RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_scripts.slurm_site import Options, Site, one_line

WAIT_SECONDS = 120
"""Number of seconds that a job's processes may keep running after one of them has ended. Rank 0 needs this time to
write a report if the job hangs."""


@dataclass(frozen=True)
class SlurmJob:
    """Options of a SLURM job that the run file does not have."""

    nodes: int
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    sbatch: Sequence[str] = ()
    """Further options of sbatch, as NAME=VALUE or NAME. They override the site's options."""
    srun: Sequence[str] = ()
    """Further options of srun, as NAME=VALUE or NAME. They override the site's options."""
    setup: str | None = None
    """A shell file that the script sources, to load modules and the Python environment."""
    wrapper: str | None = None
    """Shell text to put before `fourfold`, such as a command that runs a container."""
    save_seconds: int = 300
    """Number of seconds before the end of the wall time at which SLURM asks the job to save and stop."""
    max_crashes: int = 3
    """Maximum number of restarts in a row after crashes, without a save in between."""
    overrides: Sequence[str] = field(default=())
    """Changes to the run file, as in `--set`."""


def render_slurm_script(run_file: str, run: RunConfig, site: Site, job: SlurmJob) -> str:
    """Return the text of the batch script.

    Args:
        run_file: Path of the run file.
        run: The content of the run file.
        site: The cluster's conventions.
        job: Options of the job that the run file does not have.

    Raises:
        UserError: The grid needs more or fewer GPUs than the nodes have, or an option is not valid in SLURM.
    """
    tasks = tasks_per_node(run, site, job.nodes)
    placement = {"nodes": str(job.nodes), "ntasks-per-node": str(tasks)}
    if site.cpus_per_task is not None:
        placement["cpus-per-task"] = str(site.cpus_per_task)
    on_gpus = site.gpus_per_node is None and run.training.device != "cpu"
    sbatch = placement | ({"gpus-per-node": str(tasks)} if on_gpus else {}) | site.sbatch
    chosen = {"time": job.time, "account": job.account, "partition": job.partition}
    sbatch |= {name: value for name, value in chosen.items() if value is not None}
    sbatch |= {"job-name": run.name, "output": "%x-%j.out", "open-mode": "append"}
    sbatch |= {"signal": f"USR1@{job.save_seconds}", "requeue": ""} | _parse(job.sbatch, "--sbatch")
    srun = placement | site.srun | {"kill-on-bad-exit": "0", "wait": str(WAIT_SECONDS)} | _parse(job.srun, "--srun")
    words = ["fourfold", "train", one_line(run_file, "the run file's path")]
    command = shlex.join(words + [word for text in job.overrides for word in ("--set", one_line(text, "--set"))])
    parts = {
        "SITE": site.name,
        "SBATCH": "\n".join(f"#SBATCH {_directive(name, value)}" for name, value in sbatch.items()),
        "SETUP": _setup(site, job),
        "SRUN": " ".join(shlex.quote(_option(name, value)) for name, value in srun.items()),
        "COMMAND": f"{one_line(job.wrapper, '--wrapper')} {command}" if job.wrapper else command,
        "MAX_CRASHES": str(job.max_crashes),
    }
    template = files("fourfold.launch.job_scripts").joinpath("slurm.sh").read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda place: parts[place[1]], template)


def tasks_per_node(run: RunConfig, site: Site, nodes: int) -> int:
    """Return the number of processes per node, one per GPU.

    Raises:
        UserError: The grid needs more or fewer GPUs than the nodes have.
    """
    needed, grid = run.parallel.world_size, "·".join(str(getattr(run.parallel, axis)) for axis in AXES)
    sentence = f"the grid pp·dp·cp·z·y·x = {grid} needs {needed} GPUs, but "
    if site.gpus_per_node is None:
        if needed % nodes:
            raise UserError(f"{sentence}they cannot be divided over --nodes {nodes}; change --nodes or [parallel]")
        return needed // nodes
    available = nodes * site.gpus_per_node
    if needed == available:
        return site.gpus_per_node
    whole, left = divmod(needed, site.gpus_per_node)
    fitting = "change [parallel] to whole nodes" if left else f"use --nodes {whole}, or change [parallel]"
    raise UserError(
        f"{sentence}--nodes {nodes} of {site.name} has {available} ({site.gpus_per_node} per node); {fitting}"
    )


def _parse(options: Sequence[str], where: str) -> Options:
    """Parse options of the form NAME=VALUE or --NAME=VALUE that the user has given."""
    given = {}
    for text in options:
        name, _, value = text.removeprefix("--").partition("=")
        if not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise UserError(f"{where} {text}: write an option's long name and its value, for example {where} qos=debug")
        given[name] = value
    return given


def _option(name: str, value: str) -> str:
    return f"--{name}={value}" if value else f"--{name}"


def _directive(name: str, value: str) -> str:
    """Return an option for an #SBATCH line. Raise `UserError` if the line could not hold the option's value. sbatch
    splits such lines at spaces, and does not expand variables."""
    if re.search(r"[\s\"'#\\]", one_line(value, f"--{name}")):
        raise UserError(f"--{name}={value} cannot be in an #SBATCH line: it has a space, a quote, # or \\")
    return _option(name, value)


def _setup(site: Site, job: SlurmJob) -> str:
    """Return the script's lines for the user's setup, followed by the site's commands and environment variables.

    A variable that the user's setup has set keeps its value.
    """
    lines = []
    if job.setup is not None:
        path = shlex.quote(one_line(job.setup, "--setup"))
        # Add "./" to a plain file name, because otherwise bash would search PATH for the file.
        source = f". {path if '/' in path else f'./{path}'}"
        lines += ["# Your modules and environment", "# shellcheck source=/dev/null", source, ""]
    variables = site.environment | (site.environment_of_several_nodes if job.nodes > 1 else {})
    if site.commands or variables:
        lines += [f"# Conventions of {site.name}", *site.commands]
        lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in variables.items()]
        lines.append("")
    return "\n".join([*lines, "export PYTHONUNBUFFERED=1 # lines of the log appear immediately"])


def wall_seconds(time: str) -> int | None:
    """Convert a wall time in one of SLURM's forms, from MINUTES to DAYS-HOURS:MINUTES:SECONDS, to seconds. Return None
    for any other text, such as UNLIMITED."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return None
    days, _, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if not days and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
