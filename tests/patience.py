"""How tests wait for processes, threads, and files: until something happens, and so long that only a hang fails a
test."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE = 900.0
"""Seconds after which a test considers a wait to be a hang. This is many times what any machine needs, however busy it
is."""


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until the condition is true. Fail if the process ends first, or if the condition stays false."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < give_up, "it did not come so far"
        time.sleep(0.01)


@contextmanager
def not_forever() -> Iterator[None]:
    """Fail if the block hangs. This is for blocks that wait in this process, in its main thread."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {PATIENCE:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
