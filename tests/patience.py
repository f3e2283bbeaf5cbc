"""Wait in tests for processes, threads, and files. The time limit is so long that only a hang makes a test fail."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 900.0
"""Seconds after which a wait counts as a hang. Even a very busy machine needs far less time."""


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until the condition is true. Fail if the process ends first, or if the condition stays false."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "it did not come so far"
        time.sleep(0.01)


@contextmanager
def not_forever() -> Iterator[None]:
    """Fail if the block hangs. Use it for blocks that wait in the main thread of this process."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {PATIENCE:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
