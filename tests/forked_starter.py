"""Local workers of jobs in this process: their starter is forked from the fork server of the tests, which has imported
what they need, instead of being started anew."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


class ForkedStarter:
    """In place of the context ``spawn``: its processes have this one's environment, output and blocked signals, too."""

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
    torch.set_num_threads(1)  # torch has been imported, and does not read OMP_NUM_THREADS again
    target(*args)
