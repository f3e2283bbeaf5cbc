"""Show the progress of a slow task on standard error: as a bar in a terminal, or as lines in the log of a long
preparation."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fourfold.environment import read_environment

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def working(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar until the block ends. Yield a function that updates the bar: call it with the amount of work
    done and the total amount of work.

    Only rank 0 shows the bar, and only in a terminal. Until the first call, the bar shows only the elapsed time.
    """
    place = read_environment(os.environ)
    if not sys.stderr.isatty() or (place is not None and place.rank > 0):
        yield lambda done, total: None
        return
    from rich import progress  # rich is slow to import and needed only in a terminal.
    from rich.console import Console

    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), *times)
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    task = bar.add_task(name, total=None)
    # Block signals while the bar starts its thread. The thread inherits the blocked signals, so only the main thread
    # receives the job's signals.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        bar.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield lambda done, total: bar.update(
            task, completed=done, total=total, description=f"{name}: {done:,} of {total:,}"
        )
    finally:
        bar.stop()


@contextmanager
def show_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a task that processes `total` bytes: as a bar in a terminal, and otherwise as a line at most
    every ten seconds. Yield a function to call with the number of bytes that were processed since its last call."""
    done, last_line = 0, time.monotonic()
    with working(f"{name}, MB") as watch:

        def count(more: int) -> None:
            nonlocal done, last_line
            done += more
            watch(done // 10**6, total // 10**6)
            if not sys.stderr.isatty() and time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                print(f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)

        yield count
