"""Run test bodies on several ranks, in worker processes that start once per pytest session. Importing torch takes
seconds, so the workers are forked from a process that has already imported it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from patience import PATIENCE

from fourfold.processes import end_with_parent, keep_gloo_local

ECHO_SECONDS = 60.0
"""Seconds that the remaining ranks may take after one rank fails. They should fail soon, because they lose their
connection to the failed rank."""


class RemoteTraceback(Exception):
    """The cause of an exception from a body. Its text says on which rank and at which line the body raised the
    exception."""


@dataclass(frozen=True)
class Task:
    """The work of one rank. ``call`` is the pickled body with its arguments."""

    world_size: int
    store: str
    path: list[str]
    call: bytes
    timeout: float


@dataclass(frozen=True)
class Answer:
    """A body's result, or its exception with traceback and time. A rank that died counts as the first to fail."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    time: float = 0.0


class Pool:
    """A pool with as many workers as the largest test needs. A test on n ranks uses the first n workers. Every test
    gets a new default group (gloo), one thread per rank, and torch's generator with seed 0.
    """

    def __init__(self) -> None:
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fourfold-pool-")
        self._runs = 0

    def run(self, world_size: int, body: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
        """Call ``body(rank, world_size, *args)`` on every rank, and return the ranks' results. The body must be a
        module-level function. If ranks raise exceptions, raise the first of them here. If a rank hangs or dies, the
        pool restarts.
        """
        self._runs += 1
        self._start(world_size)
        store = os.path.join(self._folder.name, f"store-{self._runs}")
        task = pickle.dumps(Task(world_size, store, sys.path, pickle.dumps((body, args)), timeout))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(task)
        answers = self._collect(world_size, timeout)
        for rank, answer in sorted(answers.items(), key=lambda item: item[1].time):
            if answer.error is not None:
                raise answer.error from RemoteTraceback(f"on rank {rank} of {world_size}:\n\n{answer.traceback}")
        if len(answers) < world_size:
            late = sorted(set(range(world_size)) - set(answers))
            raise TimeoutError(f"ranks {late} of {world_size} were not done with {body.__qualname__} in {timeout} s")
        return [answers[rank].value for rank in range(world_size)]

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _start(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        for rank in range(len(self._processes), world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True, name=f"pool-{rank}")
            process.start()
            # Close this end here, so that the pipe closes when the worker dies.
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _collect(self, world_size: int, timeout: float) -> dict[int, Answer]:
        """Return the answers by rank. If the time is up, some answers are missing."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        answers: dict[int, Answer] = {}
        deadline, died = time.monotonic() + timeout, False
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    code, died = self._processes[rank].exitcode, True
                    answers[rank] = Answer(error=RuntimeError(f"rank {rank} of {world_size} died: exit code {code}"))
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + ECHO_SECONDS)
        if waiting or died:
            self._show_stacks(list(waiting.values()))
            self._stop()
        return answers

    def _show_stacks(self, ranks: list[int]) -> None:
        """Make hanging ranks write their stacks to standard error."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)


def prepare_fork_server() -> None:
    """Tell the fork server what to import. Call this after the tests have been imported and before the fork server
    starts."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(imported_by_bodies())


def imported_by_bodies() -> list[str]:
    """Return the modules that the fork server should import: the modules of fourfold that the tests have imported, and
    their dependencies."""
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")]
    return [
        "pytest",
        "torch._dynamo",
        "fourfold.training.trainer",
        *(name for name in sys.modules if name.startswith("fourfold.")),
        *(models if "transformers" in sys.modules else []),
    ]


def _serve(rank: int, pipe: Connection) -> None:
    """Run tasks until the pool ends. This is the main loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)
    # Imported modules are never freed, so do not search them in the garbage collection after each test.
    gc.freeze()
    end_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    keep_gloo_local()

    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_answer(rank, pickle.loads(pipe.recv_bytes())))


def _answer(rank: int, task: Task) -> bytes:
    import torch
    import torch.distributed as dist

    # Leave the last test's group only now, because its other ranks may have needed it until that test ended.
    _leave_group()
    sys.path[:] = task.path  # with this path, pytest found the module of ``body``
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(task.store, task.world_size),
            rank=rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout),
        )
        # Wait until all ranks have connected. Otherwise a rank that fails at once could leave while other ranks still
        # connect to it.
        dist.barrier()
        torch.manual_seed(0)
        body, args = pickle.loads(task.call)
        return pickle.dumps(Answer(body(rank, task.world_size, *args)))
    except BaseException as error:  # pytest's failures do not derive from Exception
        now = time.monotonic()
        answer = pickle.dumps(Answer(error=_portable(error), traceback=traceback.format_exc(), time=now))
    # Close the connections now, so that ranks that wait for this rank notice its failure.
    _leave_group()
    return answer


def _leave_group() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if dist.is_initialized():
        dist.destroy_process_group()
        # Free the group now, because reference cycles and DTensor's cache would keep it alive. The threads of a group
        # wake up a hundred times a second, so hundreds of groups would keep the cores busy.
        _clear_sharding_prop_cache()
        gc.collect()


def _portable(error: BaseException) -> BaseException:
    """Return the exception itself if it survives pickling."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # the constructor of an exception may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
