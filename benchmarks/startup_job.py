"""Train the job of ``benchmarks.startup``, and record when each part of its start is done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.processes import time_of_start
from fourfold.training import trainer

IMPORTED = time.time()
"""Time when this module was imported. In a worker process, this is a time before the fork, because the starter process
imports the modules."""

BEFORE = {"Grid": "watchdog, run folder"}
"""Maps a function that the trainer calls to the part of the start that ends when the call begins."""

CALLS = {"Grid": "groups of the grid", "open_corpora": "data", "Job": "model without weights, memory"}


def measured(place: Place, run: RunConfig, called: float) -> dict[str, float]:
    """Train, and return how many seconds each part took on this rank, from the start of the command to the end of the
    first step.

    Args:
        called: Time when the command began to start its worker processes.
    """
    marks = [
        ("", place.started),
        ("interpreter, command", called),
        ("imports of the workers", IMPORTED),
        ("fork", time_of_start()),
        ("process group", time.time()),
    ]

    def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in BEFORE:
                marks.append((BEFORE[name], time.time()))
            result = function(*args, **kwargs)
            marks.append((CALLS[name], time.time()))
            return result

        return call

    def begin_step(steps: int) -> None:
        if steps < 2:
            marks.append(("first step" if steps else "weights, files of the run", time.time()))

    with ExitStack() as stack:
        stack.enter_context(patch.object(trainer, "begin_step", begin_step))
        for name in CALLS:
            stack.enter_context(patch.object(trainer, name, marked(name, getattr(trainer, name))))
        trainer.train(place, run)
    return {part: end - begin for (_, begin), (part, end) in itertools.pairwise(marks)}
