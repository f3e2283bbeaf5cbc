"""The processes of one job on this machine, where no launcher started them: their start, their failures, their end.

Nothing here imports torch: the parent of the workers does not need it, and starts faster without.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Literal

from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.processes import available_cores, end_with_parent, keep_gloo_local

ECHO_SECONDS = 0.5
"""After one worker's failure, how long the others may be silent before the cause is chosen among the reports."""

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


class WorkerFailed(RuntimeError):
    """A worker ended by a defect; the message has its rank and its traceback, and is all there is to print."""


@dataclass(frozen=True)
class Report:
    """How one worker ended, and when, by the clock that the processes of a machine share.

    value: what it returned, the sentence of its UserError, its traceback, its exit code.
    """

    rank: int
    outcome: Literal["returned", "refused", "died", "failed"]
    value: Any
    time: float = field(default_factory=time.monotonic)


def run_workers(target: Callable[..., Any], args: Sequence[object], world_size: int) -> Any:
    """Call ``target(place, *args)`` in as many new processes; returns what rank 0 returned.

    The first UserError of a worker is raised here too; any other failure raises WorkerFailed. KeyboardInterrupt follows
    Ctrl-C, and SystemExit a SIGTERM that the workers did not handle. No worker outlives the call, nor this process.
    What rank 0 prints is seen, what the others print is not, and everyone's errors are.
    """
    processes: list[BaseProcess] = []
    try:
        with _signals_passed_on(processes) as received:
            with _interrupt_ignored():
                pipes = _start(pickle.dumps((target, tuple(args))), world_size, processes)
            return _result(_reports(pipes, processes), world_size, received)
    finally:
        with _interrupt_ignored():
            for process in processes:
                process.kill()  # not SIGTERM, at which it may try to save, with peers that are gone
            for process in processes:
                process.join()
            _show_cursor()


def prepare_environment(world_size: int) -> None:
    """Share out the cores, and keep gloo on this machine, whose name may not resolve; before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // world_size)))
    keep_gloo_local()


def _show_cursor() -> None:
    """Rank 0 may have been killed while its progress display hid it."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def _start(task: bytes, world_size: int, processes: list[BaseProcess]) -> list[Connection]:
    """Start the workers, adding each to ``processes`` at once; returns where each will report."""
    context = multiprocessing.get_context("spawn")  # not forked: the caller may have threads
    pipes = []
    for rank in range(world_size):
        place = Place(rank, rank, world_size, world_size, launcher="local")
        receiver, sender = context.Pipe(duplex=False)
        # Not a daemon, which could not have the children that load its data.
        process = context.Process(target=_work, args=(place, task, sender), name=f"fourfold-{rank}")
        process.start()
        sender.close()  # so that the worker's death is the end of the pipe
        processes.append(process)
        pipes.append(receiver)
    return pipes


def _work(place: Place, task: bytes, sender: Connection) -> None:
    """The worker's whole life. The task is unpickled here, because that may import torch."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the parent is the one to speak
    end_with_parent()
    prepare_environment(place.world_size)
    if place.rank == 0:
        sys.stdout.reconfigure(line_buffering=True)  # it may be killed for another's failure
    else:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    try:
        target, args = pickle.loads(task)
        result = target(place, *args)
        report = pickle.dumps(Report(place.rank, "returned", result if place.rank == 0 else None))
    except UserError as error:
        report = pickle.dumps(Report(place.rank, "refused", str(error)))
    except Exception:  # whatever it is: the parent chooses which one is shown
        report = pickle.dumps(Report(place.rank, "failed", traceback.format_exc()))
    sender.send_bytes(report)


def _reports(pipes: Sequence[Connection], processes: Sequence[BaseProcess]) -> list[Report]:
    """The reports in the order in which the workers ended: of all, or of those that did soon after a failure."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    reports: list[Report] = []
    failed = False
    while waiting and (ready := wait(list(waiting), ECHO_SECONDS if failed else None)):
        for pipe in ready:
            rank = waiting.pop(pipe)
            reports.append(_receive(pipe, rank, processes[rank]))
            failed |= reports[-1].outcome != "returned"
    return sorted(reports, key=lambda report: report.time)


def _receive(pipe: Connection, rank: int, process: BaseProcess) -> Report:
    with contextlib.suppress(EOFError):
        return pickle.loads(pipe.recv_bytes())
    process.join()
    return Report(rank, "died", process.exitcode)


def _result(reports: Sequence[Report], world_size: int, received: Sequence[int]) -> Any:
    """What rank 0 returned, or the failure that caused the others: a peer's loss makes every worker fail."""
    for outcome in ("refused", "died", "failed"):
        for report in reports:
            if report.outcome == outcome:
                raise _failure(report, world_size, received)
    return next(report.value for report in reports if report.rank == 0)


def _failure(report: Report, world_size: int, received: Sequence[int]) -> BaseException:
    worker = f"worker {report.rank} of {world_size}"
    if report.outcome == "refused":
        return UserError(report.value)
    if report.outcome == "failed":
        return WorkerFailed(f"{worker} failed:\n{report.value}")
    if report.value >= 0:
        return WorkerFailed(f"{worker} left with exit code {report.value} before it was done")
    if report.value == -signal.SIGINT:
        return KeyboardInterrupt()  # Ctrl-C, which reached the worker first
    if -report.value in received:
        return SystemExit(128 - report.value)  # what a shell reports of a process that the signal ended
    hint = ", as the kernel does when memory is short" if report.value == -signal.SIGKILL else ""
    return WorkerFailed(f"{worker} was ended by {signal.Signals(-report.value).name}{hint}")


@contextlib.contextmanager
def _signals_passed_on(processes: Sequence[BaseProcess]) -> Iterator[list[int]]:
    """Give the signals that ask for a save to the workers, which know how; yields the list of those received."""
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)

    with contextlib.ExitStack() as handlers:
        for signum in PASSED_ON:
            handlers.enter_context(_handler(signum, pass_on))
        yield received


def _interrupt_ignored() -> contextlib.AbstractContextManager[None]:
    """While workers start, which inherit this until they can end at Ctrl-C without a traceback, and while they end."""
    return _handler(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _handler(signum: int, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Handle a signal differently for a while; only the main thread can, and in others signals do not arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)
