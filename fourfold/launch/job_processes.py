"""Run one job on all its processes, whether torchrun, srun or this process starts them."""

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

if TYPE_CHECKING:  # torch is imported where it is used: the parent of local workers never needs it
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
    """Call ``function(place, *args)`` on every process of the job, inside a default process group.

    function: ``"package.module:name"``, a string so that the parent of local workers need not import it. timeout: for
    waiting for another process. heeds_stop_signals: the function enters ``stop_request``; the signals are held back
    until then. restarts: the times that local workers were started before. started: when the command was started, by
    the clock of ``time.time``; None: now. Returns the result of this process's call, or of rank 0's where the workers
    were started here. Raises UserError for a launcher that does not fit, or when a worker raises it, and WorkerFailed
    for a defect.
    """
    raise_file_limit()
    place = read_environment(os.environ)
    started = started or time.time()
    if place is not None or world_size == 1:
        with held_stop_signals() if heeds_stop_signals else contextlib.nullcontext():
            return _run_here(place, function, args, world_size, wanted_device, timeout, started)
    with temporary_folder() as folder:
        meeting_point = (folder / "store").as_uri()  # a file, since another program could take a port
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
    """Run this process's part: that of a launcher's process, or the whole of a job of one."""
    meeting_point = None
    if place is None:
        keep_gloo_local()
        place = Place(0, 0, 1, 1, launcher="local")
    else:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_starter()  # torchrun leaves its processes running when it is killed
        _check_world_size(place, world_size)
        host, port = rendezvous(os.environ, place)
        meeting_point = f"tcp://{host}:{port}"
    return run_in_group(replace(place, started=started), meeting_point, function, args, wanted_device, timeout)


def run_in_group(
    place: Place,
    meeting_point: str | None,
    function: str,
    args: Sequence[object],
    wanted_device: WantedDevice,
    timeout: timedelta,
) -> Any:
    """Take this process's part in run_on_grid. meeting_point: torch's init_method; None for a group of one."""
    with importing():
        call = imported(function)
    with lossy_output(any_error=True), _default_group(place, meeting_point, device_of(place, wanted_device), timeout):
        try:
            with _no_silent_exit():
                return call(place, *args)
        except SystemExit as end:  # the job itself never raises it, so its code says nothing about the job
            raise RuntimeError(f"something called sys.exit({end.code!r}) before the job was done") from end


@contextlib.contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Make ``os._exit(0)`` in this process a crash: launchers and job scripts would take it for the end of the job."""
    leave, process_id = os._exit, os.getpid()

    def leave_as_crashed(status: int) -> NoReturn:
        if status == DONE and os.getpid() == process_id:  # a child that was forked may leave as it likes
            traceback.print_stack()
            print("fourfold: something called os._exit(0) before the job was done", file=sys.stderr, flush=True)
            status = CRASH
        leave(status)

    os._exit = leave_as_crashed
    try:
        yield
    finally:
        os._exit = leave


def imported(function: str) -> Any:
    """Import the function or class ``"package.module:name"``."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def device_of(place: Place, wanted: WantedDevice) -> torch.device:
    """The GPU of this process where there are any (and the run file wants it), else the CPU."""
    import torch

    from fourfold.parallel.grid.process_group import gpu_of

    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    if not gpus:
        if wanted == "cuda":
            raise UserError(
                "training.device = 'cuda' needs a GPU, and torch sees none on this machine; use 'auto' or 'cpu', "
                "or install the build of torch that fits the GPU"
            )
        return torch.device("cpu")
    return gpu_of(place, gpus)


def _check_world_size(place: Place, world_size: int) -> None:
    if place.world_size != world_size:
        raise UserError(
            f"{place.launcher} started {place.world_size} processes, and the run file's [parallel] needs {world_size}; "
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
