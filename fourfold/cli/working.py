"""Show a progress bar on standard error for commands that may take seconds. It is shown only in a terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fourfold.environment import read_environment


@contextmanager
def working(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar until the block ends. Yield a function that takes the work done and the total work.

    Until the first call, the bar only shows that the command is working, and the elapsed time.
    """
    place = read_environment(os.environ)
    if not sys.stderr.isatty() or (place is not None and place.rank > 0):
        yield lambda done, total: None
        return
    from rich import progress  # rich is slow to import and needed only in a terminal.
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn())
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    task = bar.add_task(name, total=None)
    # The bar's thread inherits this mask and gets no signals. Only the main thread may handle or delay a job's signals.
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
