"""The processes of local workers: forked from one that has imported what they need, which takes seconds of a core.

The starter is a new process without threads, since the caller may have threads, which do not survive a fork. Where
libraries do not support forking (macOS), it starts new processes, which import for themselves.
"""

from __future__ import annotations

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
from typing import Any

from fourfold.processes import end_with_parent, importing, prepare_environment

Work = Callable[..., None]
"""What a worker runs: ``work(*args, sender)``, with the pipe on which it reports."""

STARTED_BY: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
"""multiprocessing's method that starts the starter itself."""


class WorkerProcesses:
    """The workers of one job, by rank. They end when their starter does, and it ends when the caller does."""

    def __init__(self, world_size: int) -> None:
        self.ids: list[int] = []
        """Their process ids, once ``take_ids`` has them."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world_size)]
        self.reports: list[Connection] = [receiver for receiver, _ in pipes]
        """The pipe on which each reports; its end is the worker's."""
        self._senders = [sender for _, sender in pipes]
        self._control, self._starters_control = multiprocessing.Pipe()
        self._starter: BaseProcess | None = None

    def start(self, work: Work, args: Sequence[tuple[object, ...]], modules: Sequence[str]) -> None:
        """Start the starter, which inherits blocked signals, and so do the workers.

        args: of ``work``, by rank; modules: those that the workers will import.
        """
        # Not a daemon, which could not have children.
        self._starter = STARTED_BY.Process(
            target=_start, args=(self._starters_control, work, args, self._senders, modules), name="fourfold-starter"
        )
        self._starter.start()
        for end in (self._starters_control, *self._senders):
            end.close()  # so that a worker's death is the end of its pipe

    def wait_for_start(self) -> None:
        """Wait until all workers are there, or the starter has failed and said why."""
        wait([self._control])

    def take_ids(self) -> None:
        """Make the workers known to ``send``, after ``wait_for_start``."""
        with contextlib.suppress(EOFError):
            self.ids = self._control.recv()

    def send(self, signum: int) -> None:
        """Send a signal to all workers; their ids stay theirs, since the starter collects none before the end."""
        for process_id in self.ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signum)

    def exit_code(self, rank: int) -> int:
        """Wait for the end of a worker. Negative: the signal that ended it."""
        try:
            self._control.send(rank)
            code = self._control.recv()
        except (EOFError, OSError):  # the workers ended with their starter
            assert self._starter is not None, "it was started"
            self._starter.join()
            code = self._starter.exitcode
        assert isinstance(code, int), "it has ended"
        return code

    def kill(self) -> None:
        """End all workers at once, and wait until they are gone."""
        self.send(signal.SIGKILL)  # not SIGTERM, at which they may try to save, with their peers gone
        if self._starter is not None and self._starter.pid is not None:
            if not self.ids:
                self._starter.kill()
            self._control.close()
            self._starter.join()
        for pipe in self.reports:
            pipe.close()


def _start(
    control: Connection,
    work: Work,
    args: Sequence[tuple[object, ...]],
    senders: Sequence[Connection],
    modules: Sequence[str],
) -> None:
    """Start the workers, say which processes they are, and wait for those that are named, until they shall end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    prepare_environment(len(args))
    forks = sys.platform == "linux"
    if forks:
        for module in modules:
            with importing(), contextlib.suppress(Exception):  # the workers say what is wrong
                importlib.import_module(module)
        gc.freeze()  # a collection in a worker would copy every page that all share
    context = multiprocessing.get_context("fork") if forks else multiprocessing.get_context("spawn")
    processes = []
    for rank, sender in enumerate(senders):
        others = [control, *senders[rank + 1 :]] if forks else []
        # Not a daemon, which could not have the children that load its data.
        process = context.Process(target=_work, args=(work, args[rank], sender, others), name=f"fourfold-{rank}")
        process.start()
        sender.close()
        processes.append(process)
    try:
        control.send([process.pid for process in processes])
        while True:
            process = processes[control.recv()]
            process.join()
            control.send(process.exitcode)
    except (EOFError, OSError):
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        os._exit(0)  # nothing is left to do, and the end of an interpreter with torch takes time


def _work(work: Work, args: tuple[Any, ...], sender: Connection, others: Sequence[Connection]) -> None:
    for inherited in others:
        inherited.close()
    work(*args, sender)
