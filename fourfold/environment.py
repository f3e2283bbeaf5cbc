"""Read this process's rank and the size of its job from the environment variables of torchrun or srun."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fourfold.errors import UserError

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM's own steps, such as the batch script and salloc's interactive shell, have ids of at least this number. The
steps of srun have lower ids."""


@dataclass(frozen=True)
class Place:
    """The rank of one process in a job, and the size of the job. `local_rank` and `local_world_size` count only the
    processes on the same machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: Literal["torchrun", "slurm", "local"]
    restarts: int = 0
    """Number of times that the launcher has restarted the job."""
    started: float = field(default_factory=time.time, compare=False)
    """Unix time when this attempt started. For the first attempt, this is when the command started. For a later
    attempt, this is when the processes were restarted."""


def read_environment(environ: Mapping[str, str]) -> Place | None:
    """Read this process's rank and the size of its job from the launcher's variables. Return None without a launcher.

    A process in an srun step with one task counts as started without a launcher, because users also start shells and
    torchrun that way.

    Raises:
        UserError: The launcher's variables are incomplete, invalid, or contradict each other.
    """
    step = _read_srun(environ)
    if "TORCHELASTIC_RUN_ID" in environ or step is None:
        return _read_torchrun(environ) if "RANK" in environ or "WORLD_SIZE" in environ else None
    _refuse_disagreement(environ, step)
    return step


def rendezvous(environ: Mapping[str, str], place: Place) -> tuple[str, int]:
    """Return the host and the port that the launcher's processes use to find each other.

    Args:
        environ: The environment variables.
        place: The rank and the launcher of this process. Only the launcher is used.

    Raises:
        UserError: The variables name no host, or the port or the job id is not a number.
    """
    host, default_port = environ.get("MASTER_ADDR", ""), 29_500
    if place.launcher == "slurm":
        host = host or first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        # Derive the port from the job id, because several jobs can share a node. The port stays below the ports that
        # the kernel gives to other connections.
        default_port = 10_000 + _integer(environ, "SLURM_JOB_ID", default=0) % 20_000
    if not host:
        raise UserError("the environment has RANK but not MASTER_ADDR; set it to rank 0's host, or start with torchrun")
    return host, _integer(environ, "MASTER_PORT", default=default_port)


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list. For example, `nid[0003-0007,0012],login1` gives `nid0003`.

    scontrol could do this, but a compute node might not have it.
    """
    end = re.search(r",(?![^\[]*\])", node_list)  # Cut the list at the first comma outside brackets.
    first = node_list[: end.start()] if end else node_list
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _read_torchrun(environ: Mapping[str, str]) -> Place:
    world_size = _integer(environ, "WORLD_SIZE")
    return Place(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", default=world_size),
        launcher="torchrun",
        restarts=_integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _read_srun(environ: Mapping[str, str]) -> Place | None:
    """Return the rank of this process among the tasks of an srun step. Return None if the process is not in an srun
    step, or if the step has only one task.

    SLURM also sets SLURM_PROCID = 0 and SLURM_NTASKS in batch scripts and in salloc's shells. Only the step id
    distinguishes them from the tasks of an srun step.
    """
    if "SLURM_PROCID" not in environ or not environ.get("SLURM_STEP_ID", "").isdecimal():
        return None
    tasks = _integer(environ, "SLURM_STEP_NUM_TASKS", default=_integer(environ, "SLURM_NTASKS", default=1))
    if _integer(environ, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP or tasks == 1:
        return None
    return Place(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=tasks,
        local_world_size=_tasks_on_this_node(environ, tasks),
        launcher="slurm",
        restarts=_integer(environ, "SLURM_RESTART_COUNT", default=0),
    )


def _tasks_on_this_node(environ: Mapping[str, str], tasks: int) -> int:
    """Return the number of tasks on this node, from SLURM's run-length list, such as `8(x2),4`."""
    per_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        per_node += [int(count)] * int(times or 1)
    node = _integer(environ, "SLURM_NODEID", default=0)
    return per_node[node] if node < len(per_node) else tasks


def _refuse_disagreement(environ: Mapping[str, str], step: Place) -> None:
    """Raise ``UserError`` if RANK or WORLD_SIZE contradicts srun.

    This happens if a batch script sets RANK from SLURM_PROCID before it calls srun. Then every task has the batch
    script's rank.
    """
    for name, ours in (("RANK", step.rank), ("WORLD_SIZE", step.world_size)):
        if _integer(environ, name, default=ours) != ours:
            raise UserError(
                f"{name} = {environ[name]} contradicts SLURM, for which this is task {step.rank} of {step.world_size}; "
                "unset RANK, LOCAL_RANK and WORLD_SIZE, because srun's own variables are enough"
            )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the value of an environment variable, or ``default`` if the variable is not set. Raise ``UserError`` if
    the value is not a nonnegative integer, or if there is neither a value nor a default."""
    text = environ.get(name, "" if default is None else str(default))
    if not text:
        raise UserError(f"the environment has variables of a launcher but not {name}; start with torchrun or srun")
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r} in the environment is not a whole number of 0 or more")
    return int(text)
