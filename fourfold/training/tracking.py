"""Send metrics to experiment trackers. Each tracker has its own thread, so a slow or failing one never holds up the
run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from fourfold.config.run import RunConfig
from fourfold.extras import require_extra
from fourfold.training.trackers import CLIENTS, Numbers, Tracker

MOST_WAITING = 10_000
"""Number of steps that a tracker may lag behind before the run gives up on it."""

FINISH_SECONDS = 60.0
"""Number of seconds that all trackers together have at the end of a run to deliver their last steps."""


def check_trackers(run: RunConfig) -> None:
    """Raise ``UserError`` if the library of one of the run file's trackers is not installed."""
    for name in _wanted(run):
        require_extra(name, name, f"metrics.{name} = true needs")


class Tracking:
    """The trackers of a run, on rank 0. If a tracker fails, the run prints one warning and continues without it."""

    def __init__(self, run: RunConfig, run_dir: Path, first_step: int) -> None:
        """Start the trackers. If ``first_step`` is above 0, they continue their earlier tracked runs."""
        clients = {name: partial(CLIENTS[name], run, run_dir) for name in _wanted(run)}
        self._trackers = [InBackground(name, client, first_step) for name, client in clients.items()]

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Log one line of metrics.jsonl. Metrics that are null there, because they are not finite, are left out."""
        numbers = {key: value for key, value in record.items() if key != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def go_back(self, steps: int) -> None:
        """Go back to the state after the first ``steps``. Later steps will be logged again."""
        for tracker in self._trackers:
            tracker.go_back(steps)

    def close(self, failed: bool = False) -> None:
        """End the tracked runs, and wait a limited time for them. A second call does nothing."""
        for tracker in self._trackers:
            tracker.end(failed)
        latest = time.monotonic() + FINISH_SECONDS
        for tracker in self._trackers:
            tracker.wait(latest - time.monotonic())
        self._trackers = []


class InBackground:
    """One tracker. Its client runs in a thread, so no method here fails or blocks, except ``wait``."""

    def __init__(self, name: str, client: Callable[[int], Tracker], first_step: int) -> None:
        self.name, self._client = name, client
        self._given_up = threading.Event()
        # An entry is a call of the tracker, the step at which a new tracker begins, or None at the end.
        self._waiting: Queue[Callable[[Tracker], None] | int | None] = Queue(MOST_WAITING)
        # A daemon thread does not keep a process alive.
        self._thread = threading.Thread(target=self._work, args=(first_step,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Numbers) -> None:
        """Queue the numbers of a step."""
        self._put(lambda tracker: tracker.log(step, numbers))

    def go_back(self, steps: int) -> None:
        """Queue a return to ``steps``."""
        self._put(lambda tracker: tracker.finish(failed=False), steps)

    def end(self, failed: bool) -> None:
        """Queue the end of the tracked run."""
        self._put(lambda tracker: tracker.finish(failed), None)

    def wait(self, seconds: float) -> None:
        """Wait until the tracked run has ended, but at most ``seconds``. Do not wait for a tracker that was given up
        on."""
        if self._given_up.is_set():
            return
        self._thread.join(max(seconds, 0))
        if self._thread.is_alive():
            self._give_up(f"it did not take its last numbers within {FINISH_SECONDS:g} s")

    def _put(self, *entries: Callable[[Tracker], None] | int | None) -> None:
        try:
            for entry in entries:
                if not self._given_up.is_set():
                    self._waiting.put_nowait(entry)
        except Full:
            self._give_up(f"it is {MOST_WAITING:,} steps behind")

    def _work(self, first_step: int) -> None:
        try:
            tracker = self._client(first_step)
            while not self._given_up.is_set() and (entry := self._waiting.get()) is not None:
                if isinstance(entry, int):
                    tracker = self._client(entry)
                else:
                    entry(tracker)
        except Exception as error:  # Clients raise all kinds of network and file errors.
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            print(f"warning: {self.name} no longer records this run: {reason}", file=sys.stderr, flush=True)


def _wanted(run: RunConfig) -> list[str]:
    return [name for name in CLIENTS if getattr(run.metrics, name)]
