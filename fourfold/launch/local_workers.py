"""Start the processes of a job on this machine if no launcher has started them. Report failures, and end the processes.

This module does not import torch. The parent of the workers does not need torch, and starts faster without it.
"""

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Literal

from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.exit_codes import HANG, ended_by
from fourfold.launch.stop_signals import RELAYED_INTERRUPT, STOP_SIGNALS, held_stop_signals, leave_terminal
from fourfold.launch.worker_processes import WorkerProcesses
from fourfold.processes import end_with_parent

ECHO_SECONDS = 0.5
"""After a failure, collect further reports until none has arrived for this many seconds. Then choose the report that
most likely names the cause."""

RELAYED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGINT: RELAYED_INTERRUPT,
}
"""Maps each signal that this process receives to the signal that it then sends to the workers."""


class WorkerFailed(RuntimeError):
    """A worker crashed. The message names the worker and includes its traceback if there is one.

    So print only the message, without a traceback of this process.
    """


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended."""

    rank: int
    outcome: Literal["returned", "refused", "died", "failed"]
    value: Any
    """Depends on ``outcome``: the return value of rank 0 ("returned"), the message of the UserError ("refused"), the
    exit code ("died"), or the traceback ("failed")."""
    time: float = field(default_factory=time.monotonic)
    """Time at which the worker ended, as `time.monotonic()` returns it. All processes of a machine share this clock."""


class JobHung(WorkerFailed):
    """The job hung. Its watchdog has ended the job, and has already printed which rank went silent."""


def run_workers(
    target: Callable[..., Any],
    args: Sequence[object],
    world_size: int,
    heeds_stop_signals: bool = False,
    restarts: int = 0,
    modules: Sequence[str] = (),
    started: float | None = None,
) -> Any:
    """Call `target(place, *args)` in `world_size` new processes. `place` holds the rank of a process and the size of
    the job.

    All workers end when this call ends or when this process ends. Only rank 0 writes to standard output. All ranks
    write to standard error.

    Args:
        target: The function to call in each worker.
        args: Arguments of the function after `place`.
        world_size: Number of processes.
        heeds_stop_signals: Whether the target handles stop signals with `stop_request`. Until it does, the workers hold
            back stop signals.
        restarts: How many times the workers have been restarted.
        modules: Modules that the target imports. On Linux, they are imported only once for all workers.
        started: `Place.started` of the workers (default: now).

    Returns:
        The result of rank 0.

    Raises:
        UserError: A worker raised this error. If several workers did, this is the first error.
        WorkerFailed: A worker failed in another way.
        KeyboardInterrupt: The user pressed Ctrl-C, and the workers do not handle it. Or the user pressed Ctrl-C after
            another stop signal.
        SystemExit: Another stop signal arrived, and the workers do not handle it. Or a second SIGTERM arrived.
    """
    workers = WorkerProcesses(world_size)
    try:
        with _signals_relayed(workers, heeds_stop_signals) as received:
            with _signals_blocked():
                task = pickle.dumps((target, tuple(args)))
                first = Place(0, 0, world_size, world_size, "local", restarts, started or time.time())
                places = [replace(first, rank=rank, local_rank=rank) for rank in range(world_size)]
                workers.start(_work, [(place, task, heeds_stop_signals) for place in places], modules)
            workers.wait_for_start()
            with _signals_blocked():
                workers.take_ids()
                for signum in tuple(received):
                    workers.send(RELAYED[signal.Signals(signum)])
            return _return_or_raise(_collect_reports(workers), world_size, received)
    finally:
        with _handler(signal.SIGINT, signal.SIG_IGN):
            workers.kill()
            # The progress display of rank 0 hides the terminal's cursor, and a killed rank 0 cannot show it again.
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)


def _work(place: Place, task: bytes, heeds_stop_signals: bool, sender: Connection) -> None:
    """Run the task in a worker, and report the result. Unpickling the task may import torch, so only workers do it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # After Ctrl-C, the parent sends ``RELAYED_INTERRUPT`` instead.
    if not heeds_stop_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent()
    if place.rank == 0:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        # Flush every line, because this worker may be killed when another worker fails. Replace characters that the
        # terminal's encoding lacks.
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    else:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    try:
        target, args = pickle.loads(task)
        result = target(place, *args)
        report = pickle.dumps(WorkerEnd(place.rank, "returned", result if place.rank == 0 else None))
    except UserError as error:
        report = pickle.dumps(WorkerEnd(place.rank, "refused", str(error)))
    except Exception:  # Report any failure. The parent chooses which failure to show.
        report = pickle.dumps(WorkerEnd(place.rank, "failed", traceback.format_exc()))
    sender.send_bytes(report)


def _collect_reports(workers: WorkerProcesses) -> list[WorkerEnd]:
    """Collect the reports of all workers, sorted by time. After a failure, stop when no report has come for
    ``ECHO_SECONDS``."""
    waiting: dict[object, int] = {pipe: rank for rank, pipe in enumerate(workers.reports)}
    reports: list[WorkerEnd] = []
    failed = False
    pipes = workers.reports
    while waiting and (ready := wait([pipes[rank] for rank in waiting.values()], ECHO_SECONDS if failed else None)):
        for pipe in ready:
            reports.append(_receive(workers, waiting.pop(pipe)))
            failed |= reports[-1].outcome != "returned"
    return sorted(reports, key=lambda report: report.time)


def _receive(workers: WorkerProcesses, rank: int) -> WorkerEnd:
    try:
        report: WorkerEnd = pickle.loads(workers.reports[rank].recv_bytes())
    except (EOFError, OSError):  # The worker may have died while it sent its report.
        report = WorkerEnd(rank, "died", workers.exit_code(rank))
    return report


def _return_or_raise(reports: Sequence[WorkerEnd], world_size: int, received: Sequence[int]) -> Any:
    """Return rank 0's value, or raise the failure that is most likely the cause.

    The first UserError counts as the cause. If there is none, the first worker that died counts as the cause. If no
    worker died, the first exception counts. All other failures may be consequences, because a worker fails if another
    worker is gone.
    """
    for outcome in ("refused", "died", "failed"):
        for report in reports:
            if report.outcome == outcome:
                raise _make_failure(report, world_size, received)
    return next(report.value for report in reports if report.rank == 0)


def _make_failure(report: WorkerEnd, world_size: int, received: Sequence[int]) -> BaseException:
    worker = f"worker {report.rank} of {world_size}"
    if report.outcome == "refused":
        return UserError(report.value)
    if report.outcome == "failed":
        return WorkerFailed(f"{worker} failed:\n{report.value}")
    if report.value == HANG:
        return JobHung("the job hung and was ended")
    # The worker got a stop signal but did not stop in time. Its watchdog then ended it with exit code 128 + the
    # signal's number.
    if report.value > 128 and report.value - 128 in received:
        return SystemExit(report.value)
    if report.value >= 0:
        return WorkerFailed(f"{worker} exited with code {report.value} before it had finished")
    if report.value == -RELAYED_INTERRUPT and signal.SIGINT in received:
        return KeyboardInterrupt()
    if -report.value in received:
        return SystemExit(ended_by(-report.value))
    hint = ", which the kernel sends when memory runs out" if report.value == -signal.SIGKILL else ""
    return WorkerFailed(f"{worker} was ended by {signal.Signals(-report.value).name}{hint}")


@contextlib.contextmanager
def _signals_relayed(workers: WorkerProcesses, heeded: bool) -> Iterator[list[int]]:
    """Relay stop signals to the workers, so that they can save. Yield the list of received signals.

    A signal may arrive before all workers exist. If the workers handle stop signals (`heeded`), this function records
    the signal, and the caller sends it to the workers later. Otherwise the signal ends the job immediately.

    Raises:
        KeyboardInterrupt: A Ctrl-C ends the job immediately, or follows another stop signal. The caller must end the
            workers.
        SystemExit: Another stop signal ends the job immediately, or a second SIGTERM arrived. The caller must end the
            workers.
    """
    received: list[int] = []

    def relay(signum: int, frame: FrameType | None) -> None:
        ends_at_once = not heeded and not workers.ids
        if signum == signal.SIGINT and (received or ends_at_once):
            raise KeyboardInterrupt
        if ends_at_once or (signum == signal.SIGTERM and signum in received):
            raise SystemExit(ended_by(signum))
        if signum == signal.SIGHUP:
            leave_terminal()
        received.append(signum)
        workers.send(RELAYED[signal.Signals(signum)])

    with contextlib.ExitStack() as handlers:
        for signum in RELAYED:
            # Do not handle SIGHUP if nohup has set it to be ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                handlers.enter_context(_handler(signum, relay))
        yield received


def _signals_blocked() -> contextlib.AbstractContextManager[None]:
    """Block stop signals in this process. Workers that start meanwhile block these signals too, and unblock them when
    they can handle them."""
    resource_tracker.ensure_running()  # Start the tracker now, because starting it later would unblock SIGINT.
    return held_stop_signals()


@contextlib.contextmanager
def _handler(signum: int, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Use another handler for a signal while the `with` block runs.

    In threads other than the main thread, this does nothing, because only the main thread can set signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)
