"""Start local workers of jobs quickly. The tests' fork server has already imported the needed modules. So it forks the
process that starts the workers. A new process would need seconds for these imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class ForkedStarter:
    """A replacement for multiprocessing's ``spawn`` context. Its processes get this process's environment, output, and
    blocked signals."""

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        outputs = [Connection(os.dup(descriptor), readable=False) for descriptor in (1, 2)]
        inherited = (dict(os.environ), blocked, outputs, target, args)
        return multiprocessing.get_context("forkserver").Process(target=_as_if_spawned, args=inherited, name=name)


def _as_if_spawned(
    environment: dict[str, str],
    blocked: set[signal.Signals],
    outputs: list[Connection],
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), descriptor)
        output.close()
    # torch is already imported here, so it does not read OMP_NUM_THREADS again.
    torch.set_num_threads(1)
    target(*args)
