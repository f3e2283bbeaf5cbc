"""Run a job on all its processes. torchrun, srun, or this process can start them."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from fourfold.environment import Place, read_environment, rendezvous
from fourfold.errors import UserError
from fourfold.launch.local_workers import run_workers
from fourfold.launch.stop_signals import held_stop_signals
from fourfold.processes import end_with_starter, importing, keep_gloo_local, lossy_output, raise_file_limit

if TYPE_CHECKING:  # torch is imported inside functions, because the parent of local workers never needs it.
    import torch

WantedDevice = Literal["auto", "cpu", "cuda"]


def run_on_grid(
    function: str,
    args: Sequence[object],
    world_size: int,
    wanted_device: WantedDevice = "auto",
    timeout: timedelta = timedelta(minutes=10),
    heeds_stop_signals: bool = False,
    restarts: int = 0,
    started: float | None = None,
) -> Any:
    """Call `function(place, *args)` on every process of the job, with torch's default process group.

    If no launcher has started processes, start local workers. `place` holds the rank of a process and the size of the
    job.

    Args:
        function: "package.module:name". It is a string, so that the parent of local workers need not import the
            function.
        args: Arguments of the function after `place`.
        world_size: Number of processes.
        wanted_device: "cpu", "cuda", or "auto". "auto" uses a GPU if there is one.
        timeout: Longest time that a collective waits for another process.
        heeds_stop_signals: Whether the function handles stop signals with `stop_request`. Until it does, stop signals
            are held back.
        restarts: How many times local workers have been restarted.
        started: Time at which the command started, as `time.time()` returns it (default: now).

    Returns:
        The result of the call on this process. If this process has started local workers, the result of rank 0.

    Raises:
        UserError: A launcher did not start `world_size` processes, or a process of the job raised this error.
        WorkerFailed: A worker crashed.
        KeyboardInterrupt, SystemExit: See `run_workers`.
    """
    raise_file_limit()
    place = read_environment(os.environ)
    started = started or time.time()
    task = (function, args, wanted_device, timeout)
    if place is None and world_size > 1:
        with TemporaryDirectory(prefix="fourfold-", ignore_cleanup_errors=True) as folder:
            meeting_point = Path(folder, "store").as_uri()  # Meet through a file, because a port may already be in use.
            modules = [function.partition(":")[0], "fourfold.parallel.grid.process_group"]
            all_args = (meeting_point, *task)
            return run_workers(run_in_group, all_args, world_size, heeds_stop_signals, restarts, modules, started)
    with held_stop_signals() if heeds_stop_signals else contextlib.nullcontext():
        here, meeting_point_here = _place_here(place, world_size)
        return run_in_group(replace(here, started=started), meeting_point_here, *task)


def _place_here(place: Place | None, world_size: int) -> tuple[Place, str | None]:
    """Return this process's place (its rank, and the size of its job), then the address where the processes meet.

    Either a launcher started this process, or this is the only process of the job. In the second case, the address is
    None.
    """
    if place is None:
        keep_gloo_local()
        return Place(0, 0, 1, 1, launcher="local"), None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_starter()  # Without this, a killed torchrun would leave its processes running.
    if place.world_size != world_size:
        raise UserError(
            f"{place.launcher} started {place.world_size} processes, but the run file's [parallel] needs {world_size}; "
            f"start {world_size}, or change [parallel]"
        )
    host, port = rendezvous(os.environ, place)
    return place, f"tcp://{host}:{port}"


def run_in_group(
    place: Place,
    meeting_point: str | None,
    function: str,
    args: Sequence[object],
    wanted: WantedDevice,
    timeout: timedelta,
) -> Any:
    """Start the default process group, and call the function on this process. See `run_on_grid`.

    Args:
        place: The rank of this process, and the size of the job.
        meeting_point: The address where the processes meet, as in torch's `init_method`. None for one process.
        function: "package.module:name".
        args: Arguments of the function after `place`.
        wanted: See `wanted_device` of `run_on_grid`.
        timeout: See `run_on_grid`.
    """
    with importing():
        call = pkgutil.resolve_name(function)
    from fourfold.parallel.grid.process_group import end_process_group, start_process_group

    with lossy_output(any_error=True):
        start_process_group(place, meeting_point, choose_device(place, wanted), timeout)
        failed = True
        try:
            result = call(place, *args)
            failed = False
            return result
        except SystemExit as end:
            # A library called sys.exit, so the exit code does not describe the job.
            raise RuntimeError(f"something called sys.exit({end.code!r}) before the job had finished") from end
        finally:
            end_process_group(failed)


def choose_device(place: Place, wanted: WantedDevice) -> torch.device:
    """Return this process's GPU, or the CPU if `wanted` is "cpu". With "auto", return the CPU if there is no GPU.

    Raises:
        UserError: `wanted` is "cuda", but there is no GPU.
    """
    import torch

    from fourfold.parallel.grid.process_group import gpu_of

    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if not gpus:
        if wanted == "cuda":
            raise UserError(
                "training.device = 'cuda' needs a GPU, but torch sees none on this machine; use 'auto' or 'cpu', "
                "or install the build of torch that fits the GPU"
            )
        return torch.device("cpu")
    return gpu_of(place, gpus)
