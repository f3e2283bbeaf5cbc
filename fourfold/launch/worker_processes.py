"""Start local workers by forking a starter process that has already imported the modules they need.

Imports take seconds of CPU time, so they should run only once. The calling process cannot be forked, because it may
have threads, and a forked process loses the threads of its parent. So the starter is a new process without threads. On
macOS, libraries do not support forking, so the starter spawns new processes, and each of them imports the modules.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from fourfold.exit_codes import CRASH, DONE
from fourfold.processes import end_with_parent, importing, lossy_output, prepare_environment

Work = Callable[..., None]
"""The function that a worker runs, as `work(*args, sender)`. The worker sends its report through the pipe `sender`."""

STARTED_BY: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
"""How multiprocessing starts the starter itself."""


class WorkerProcesses:
    """The workers of one job. They end when the starter ends, and the starter ends when the calling process ends."""

    def __init__(self, world_size: int) -> None:
        self.ids: dict[int, int] = {}
        """The process id of each worker by rank. `take_ids` adds the ids, and `exit_code` removes them."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world_size)]
        self.reports: list[Connection] = [receiver for receiver, _ in pipes]
        """The pipe through which each worker sends its report, by rank. The pipe closes when the worker ends."""
        self._senders = [sender for _, sender in pipes]
        self._control, self._starters_control = multiprocessing.Pipe()
        self._starter: BaseProcess | None = None

    def start(self, work: Work, args: Sequence[tuple[object, ...]], modules: Sequence[str]) -> None:
        """Start the starter, which then starts the workers. All of them block the signals that this process blocks.

        Args:
            work: The function that each worker runs.
            args: Arguments of `work`, by rank.
            modules: Modules that the workers will import.
        """
        # The starter must not be a daemon, because a daemon cannot have children.
        self._starter = STARTED_BY.Process(
            target=_start, args=(self._starters_control, work, args, self._senders, modules), name="fourfold-starter"
        )
        self._starter.start()
        for end in (self._starters_control, *self._senders):
            # Only the starter and the workers use these ends of the pipes. Close this process's copies, so that a pipe
            # closes when the starter or worker that uses it dies.
            end.close()

    def wait_for_start(self) -> None:
        """Wait until all workers exist, or until the starter has failed and reported why."""
        wait([self._control])

    def take_ids(self) -> None:
        """Receive the process ids of the workers, which `send` needs. Call this after `wait_for_start`."""
        with contextlib.suppress(EOFError):
            self.ids = dict(enumerate(self._control.recv()))

    def send(self, signum: int) -> None:
        """Send a signal to all workers.

        The ids are safe to use, because the system can give a worker's id to another process only after `exit_code` has
        waited for the worker.
        """
        for process_id in self.ids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signum)

    def exit_code(self, rank: int) -> int:
        """Wait for a worker to end, and return its exit code.

        If a signal has ended the worker, the code is minus the signal's number. If the starter has died, return the
        starter's exit code.
        """
        try:
            self._control.send(rank)
            code = self._control.recv()
            # The system may now give this process id to another process, so forget the id.
            self.ids.pop(rank, None)
        except (EOFError, OSError):  # The workers ended together with their starter.
            assert self._starter is not None, "it was started"
            self._starter.join()
            code = self._starter.exitcode
        assert isinstance(code, int), "it has ended"
        return code

    def kill(self) -> None:
        """Kill all workers and wait until they are gone."""
        self.send(signal.SIGKILL)  # After SIGTERM, the workers would try to save, but some of them may be gone.
        if self._starter is not None and self._starter.pid is not None:
            if not self.ids:
                self._starter.kill()
            self._control.close()
            self._starter.join()
        for pipe in self.reports:
            pipe.close()


# Starting a process flushes the output, which fails if nobody reads it any more.
@lossy_output(any_error=True)
def _start(
    control: Connection,
    work: Work,
    args: Sequence[tuple[object, ...]],
    senders: Sequence[Connection],
    modules: Sequence[str],
) -> None:
    """Run the starter: start the workers, and send their process ids to the caller.

    Then answer the caller's requests: for each requested rank, wait for the worker, and send its exit code. When the
    caller ends, kill the workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    prepare_environment(len(args))
    forks = sys.platform == "linux"
    if forks:
        for module in modules:
            with importing(), contextlib.suppress(Exception):  # The workers will report any error.
                importlib.import_module(module)
        # Exclude all objects from garbage collection. Otherwise a collection in a worker would copy the memory that the
        # worker shares with its parent.
        gc.freeze()
    context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    try:
        for rank, sender in enumerate(senders):
            others = [control, *senders[rank + 1 :]] if forks else []
            # The worker must not be a daemon, because a daemon cannot have children. A worker may start processes, for
            # example to tokenize the built-in corpus.
            process = context.Process(target=_work, args=(work, args[rank], sender, others), name=f"fourfold-{rank}")
            process.start()
            sender.close()
            processes.append(process)
    except OSError as error:
        print(f"fourfold: cannot start process {len(processes) + 1} of {len(args)}: {error.strerror}", file=sys.stderr)
        _end(processes, CRASH)
    try:
        control.send([process.pid for process in processes])
        while True:
            process = processes[control.recv()]
            process.join()
            control.send(process.exitcode)
    except (EOFError, OSError):
        _end(processes, DONE)


def _end(processes: Sequence[BaseProcess], code: int) -> NoReturn:
    """Kill the workers, and exit immediately. With torch loaded, a normal exit would take long."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    sys.stderr.flush()
    os._exit(code)


def _work(work: Work, args: tuple[Any, ...], sender: Connection, others: Sequence[Connection]) -> None:
    for inherited in others:
        inherited.close()
    work(*args, sender)
