"""Experiment trackers of a run, each in a thread of its own: a slow or failing one never holds up the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import Full, Queue
from typing import Any, Self

from fourfold.config.run import RunConfig
from fourfold.extras import require_extra
from fourfold.training.provenance import provenance
from fourfold.training.trackers import CLIENTS, Numbers, TrackedRun, Tracker

MOST_WAITING = 10_000
"""Steps that may wait for a slow tracker; it is given up when there are more."""

FINISH_SECONDS = 60.0
"""Time that all trackers together have at the end of a run to deliver what waits."""


@dataclass(frozen=True)
class _LoggedStep:
    step: int
    numbers: Numbers


@dataclass(frozen=True)
class _GoBack:
    steps: int


@dataclass(frozen=True)
class _End:
    failed: bool


def check_trackers(run: RunConfig) -> None:
    """Raise ``UserError`` for a tracker of the run file whose library is not installed."""
    for name in _wanted(run):
        require_extra(name, name, f"metrics.{name} = true needs")


class Tracking:
    """The trackers of a run, on its first rank.

    ``first_step``: steps taken before; above 0 the same tracked runs go on. A failure of a tracker is one warning, and
    the run goes on without it.
    """

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int, device_name: str) -> None:
        tracked = TrackedRun(run, run_dir, cache(partial(provenance, device_name, run.parallel.world_size)))
        self._trackers = [InBackground(name, CLIENTS[name], tracked, first_step) for name in _wanted(run)]

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Pass on one line of metrics.jsonl; numbers that are not finite, which are null there, are left out."""
        numbers = {key: value for key, value in record.items() if key != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def go_back(self, steps: int) -> None:
        """Continue after the first ``steps``, which later ones follow once more."""
        for tracker in self._trackers:
            tracker.go_back(steps)

    def close(self, failed: bool = False) -> None:
        """End the tracked runs, and wait a limited time for them; a second call does nothing."""
        for tracker in self._trackers:
            tracker.end(failed)
        latest = time.monotonic() + FINISH_SECONDS
        for tracker in self._trackers:
            tracker.wait(latest - time.monotonic())
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)


class InBackground:
    """One tracker, whose client is made and called in a thread: no call here waits, but for ``wait``, or fails."""

    def __init__(
        self, name: str, client: Callable[[TrackedRun, int], Tracker], tracked: TrackedRun, first_step: int
    ) -> None:
        self.name, self._client, self._tracked = name, client, tracked
        self._given_up = threading.Event()
        self._waiting: Queue[_LoggedStep | _GoBack | _End] = Queue(MOST_WAITING)
        # A daemon, which a process that ends does not wait for.
        self._thread = threading.Thread(target=self._work, args=(first_step,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Numbers) -> None:
        """Have the numbers of a step recorded."""
        self._put(_LoggedStep(step, numbers))

    def go_back(self, steps: int) -> None:
        """Have the run continued after ``steps``."""
        self._put(_GoBack(steps))

    def end(self, failed: bool) -> None:
        """Have the run ended."""
        self._put(_End(failed))

    def wait(self, seconds: float) -> None:
        """Wait until the run is ended, at most so long; not for a tracker that is given up."""
        if self._given_up.is_set():
            return
        self._thread.join(max(seconds, 0))
        if self._thread.is_alive():
            self._give_up(f"it has not taken its last numbers within {FINISH_SECONDS:g} s")

    def _put(self, item: _LoggedStep | _GoBack | _End) -> None:
        if self._given_up.is_set():
            return
        try:
            self._waiting.put_nowait(item)
        except Full:
            self._give_up(f"it is {MOST_WAITING:,} steps behind")

    def _work(self, first_step: int) -> None:
        try:
            tracker = self._client(self._tracked, first_step)
            while not self._given_up.is_set():
                item = self._waiting.get()
                if isinstance(item, _LoggedStep):
                    tracker.log(item.step, item.numbers)
                elif isinstance(item, _GoBack):
                    tracker.finish(failed=False)
                    tracker = self._client(self._tracked, item.steps)
                else:
                    tracker.finish(item.failed)
                    return
        except Exception as error:  # clients raise whatever their networks and files do
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            print(f"warning: {self.name} records no more of this run: {reason}", file=sys.stderr, flush=True)


def _wanted(run: RunConfig) -> list[str]:
    return [name for name in CLIENTS if getattr(run.metrics, name)]
