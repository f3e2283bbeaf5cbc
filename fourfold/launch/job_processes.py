"""One job on all its processes, however they were started: by torchrun, by srun, or by this process itself."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fourfold.errors import UserError
from fourfold.launch.environment import Place, read_environment, rendezvous
from fourfold.launch.local_workers import keep_gloo_local, run_workers

if TYPE_CHECKING:  # torch is imported where it is used: the parent of local workers never needs it
    import torch

WantedDevice = Literal["auto", "cpu", "cuda"]


def run_on_grid(
    function: str,
    args: Sequence[object],
    world_size: int,
    wanted_device: WantedDevice = "auto",
    timeout: timedelta = timedelta(minutes=10),
) -> Any:
    """Call ``function(place, *args)`` on every process of the job, inside a default process group.

    function: ``"package.module:name"``, a string so that the parent of local workers need not import it.
    Returns what this process's call returned; where the workers were started here, what rank 0's did.
    Raises UserError for a launcher that does not fit, or when a worker raises it, and WorkerFailed for a defect.
    """
    place = read_environment(os.environ)
    if place is not None:
        _check_world_size(place, world_size)
        host, port = rendezvous(os.environ, place)
        return run_in_group(place, f"tcp://{host}:{port}", function, args, wanted_device, timeout)
    if world_size == 1:
        keep_gloo_local()
        return run_in_group(Place(0, 0, 1, 1, launcher="local"), None, function, args, wanted_device, timeout)
    with tempfile.TemporaryDirectory(prefix="fourfold-") as folder:
        meeting_point = Path(folder, "store").as_uri()  # a file: no port that another program could have
        return run_workers(run_in_group, (meeting_point, function, args, wanted_device, timeout), world_size)


def run_in_group(
    place: Place,
    meeting_point: str | None,
    function: str,
    args: Sequence[object],
    wanted_device: WantedDevice,
    timeout: timedelta,
) -> Any:
    """This process's part of run_on_grid. meeting_point: torch's init_method; None for a group of one."""
    ignore_known_warnings()
    call = imported(function)
    with _default_group(place, meeting_point, device_of(place, wanted_device), timeout):
        return call(place, *args)


def imported(function: str) -> Any:
    """What ``"package.module:name"`` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def device_of(place: Place, wanted: WantedDevice) -> torch.device:
    """The GPU of this process where there are any (and the run file wants it), else the CPU.

    Where a scheduler shows every task one GPU of its own, that GPU is number 0 to all of them.
    """
    import torch

    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if not gpus:
        if wanted == "cuda":
            raise UserError(
                "training.device = 'cuda' needs a GPU, and torch sees none on this machine; use 'auto' or 'cpu', "
                "or install the build of torch that fits the GPU"
            )
        return torch.device("cpu")
    if place.launcher == "local" and place.world_size > gpus:
        raise UserError(
            f"the run file's [parallel] needs {place.world_size} processes with a GPU each, and this machine shows "
            f"{gpus}; make [parallel] smaller, start on more machines with srun or torchrun, or set "
            "training.device = 'cpu'"
        )
    return torch.device("cuda", place.local_rank % gpus)


def ignore_known_warnings() -> None:
    """FSDP and others still call collectives by names that newer versions of torch rename."""
    renamed = r"`torch\.distributed\.\w+(\.\w+)?` is deprecated"
    warnings.filterwarnings("ignore", renamed, category=FutureWarning)


def _check_world_size(place: Place, world_size: int) -> None:
    if place.world_size != world_size:
        raise UserError(
            f"{place.launcher} started {place.world_size} processes, and the run file's [parallel] needs {world_size}; "
            f"start {world_size}, or change [parallel]"
        )


@contextlib.contextmanager
def _default_group(place: Place, meeting_point: str | None, device: torch.device, timeout: timedelta) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",  # on AMD, "nccl" is RCCL
            init_method=meeting_point,
            store=dist.HashStore() if meeting_point is None else None,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {place.rank} of {place.world_size} could not meet the others at {meeting_point} "
            f"({str(error).splitlines()[0]}); set MASTER_ADDR and MASTER_PORT to a free port on rank 0's host"
        ) from error
    done = False
    try:
        yield
        done = True
    finally:
        # After a failure NCCL would wait for peers that may never answer; the end of the process ends such a group.
        # Gloo's must always end here, or its threads abort the process at exit, whatever its exit code was.
        if done or not on_gpu or place.world_size == 1:
            dist.destroy_process_group()
