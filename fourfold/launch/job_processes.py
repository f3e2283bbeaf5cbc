"""Run one job on all its processes, whether torchrun, srun, or this process starts them."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from fourfold.data.files import temporary_folder
from fourfold.environment import Place, read_environment, rendezvous
from fourfold.errors import UserError
from fourfold.exit_codes import CRASH, DONE
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
    """Call `function(place, *args)` on every process of the job, inside a default process group.

    Args:
        function: "package.module:name". It is a string, so that the parent of local workers need not import the
            function.
        args: Arguments of the function after the place.
        world_size: Number of processes.
        wanted_device: "cpu", "cuda", or "auto" for a GPU if there is one.
        timeout: Longest time that a collective waits for another process.
        heeds_stop_signals: Whether the function enters `stop_request`. Stop signals are held back until then.
        restarts: Number of times that local workers were restarted.
        started: Time at which the command started, as `time.time()` returns it (default: now).

    Returns:
        The result of this process's call, or of rank 0's call if the workers were started here.

    Raises:
        UserError: The launcher does not fit the run, or a worker raised this error.
        WorkerFailed: A worker crashed.
        KeyboardInterrupt, SystemExit: See `run_workers`.
    """
    raise_file_limit()
    place = read_environment(os.environ)
    started = started or time.time()
    if place is not None or world_size == 1:
        with held_stop_signals() if heeds_stop_signals else contextlib.nullcontext():
            return _run_here(place, function, args, world_size, wanted_device, timeout, started)
    with temporary_folder() as folder:
        meeting_point = (folder / "store").as_uri()  # Meet through a file, because a port may already be in use.
        task = (meeting_point, function, args, wanted_device, timeout)
        modules = [function.partition(":")[0], "fourfold.parallel.grid.process_group"]
        return run_workers(run_in_group, task, world_size, heeds_stop_signals, restarts, modules, started)


def _run_here(
    place: Place | None,
    function: str,
    args: Sequence[object],
    world_size: int,
    wanted_device: WantedDevice,
    timeout: timedelta,
    started: float,
) -> Any:
    """Run this process's part of the job. It is either one process of a launcher, or the only process of the job."""
    meeting_point = None
    if place is None:
        keep_gloo_local()
        place = Place(0, 0, 1, 1, launcher="local")
    else:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_starter()  # Without this, a killed torchrun would leave its processes running.
        _check_world_size(place, world_size)
        host, port = rendezvous(os.environ, place)
        meeting_point = f"tcp://{host}:{port}"
    return run_in_group(replace(place, started=started), meeting_point, function, args, wanted_device, timeout)


def run_in_group(
    place: Place,
    meeting_point: str | None,
    function: str,
    args: Sequence[object],
    wanted: WantedDevice,
    timeout: timedelta,
) -> Any:
    """Start the default process group and call the function. See `run_on_grid`.

    Args:
        place: This process's place in the job.
        meeting_point: torch's init_method, or None for a group of one process.
        function: "package.module:name".
        args: Arguments of the function after the place.
        wanted: See `wanted_device` of `run_on_grid`.
        timeout: See `run_on_grid`.
    """
    with importing():
        call = import_object(function)
    with lossy_output(any_error=True), _default_group(place, meeting_point, choose_device(place, wanted), timeout):
        try:
            with _no_silent_exit():
                return call(place, *args)
        except SystemExit as end:  # A library raised this, so its exit code says nothing about the job.
            raise RuntimeError(f"something called sys.exit({end.code!r}) before the job had finished") from end


@contextlib.contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Turn `os._exit(0)` in this process into a crash. Otherwise a launcher or job script would think that the job is
    done."""
    leave, process_id = os._exit, os.getpid()

    def leave_as_crashed(status: int) -> NoReturn:
        if status == DONE and os.getpid() == process_id:  # Forked children may exit this way.
            traceback.print_stack()
            print("fourfold: something called os._exit(0) before the job had finished", file=sys.stderr, flush=True)
            status = CRASH
        leave(status)

    os._exit = leave_as_crashed
    try:
        yield
    finally:
        os._exit = leave


def import_object(function: str) -> Any:
    """Import the function or class "package.module:name"."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def choose_device(place: Place, wanted: WantedDevice) -> torch.device:
    """Return this process's GPU. If `wanted` is "cpu", or if it is "auto" and there is no GPU, return the CPU.

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


def _check_world_size(place: Place, world_size: int) -> None:
    if place.world_size != world_size:
        raise UserError(
            f"{place.launcher} started {place.world_size} processes, but the run file's [parallel] needs {world_size}; "
            f"start {world_size}, or change [parallel]"
        )


@contextlib.contextmanager
def _default_group(place: Place, meeting_point: str | None, device: torch.device, timeout: timedelta) -> Iterator[None]:
    from fourfold.parallel.grid.process_group import end_process_group, start_process_group

    start_process_group(place, meeting_point, device, timeout)
    failed = True
    try:
        yield
        failed = False
    finally:
        end_process_group(failed)
