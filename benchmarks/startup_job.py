"""Run the job of ``benchmarks.startup``, a training loop that records when its parts are done."""

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
"""Time when this module was imported. For a worker, this is before the fork."""

BEFORE = {"Grid": "watchdog, run folder"}
"""Parts that end when the loop calls these functions."""

CALLS = {"Grid": "groups of the grid", "open_corpora": "data", "Job": "model without weights, memory"}


def measured(place: Place, run: RunConfig, called: float) -> dict[str, float]:
    """Train, and return the seconds of each part on this rank, from the command to the end of the first step.

    Args:
        called: Time when the command asked for the workers.
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
