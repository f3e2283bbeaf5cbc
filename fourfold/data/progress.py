"""Show the progress of a long preparation on stderr: a bar in a terminal, or a plain line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a task over `total` bytes. Yield a function that adds to the bytes done."""
    if sys.stderr.isatty():
        with _terminal_bar(name, total) as advance:
            yield advance
        return
    done, last_line = 0, time.monotonic()

    def count(more: int) -> None:
        nonlocal done, last_line
        done += more
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            print(f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)

    yield count


@contextmanager
def _terminal_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich import progress  # rich is slow to import and needed only in a terminal.
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        yield partial(bar.advance, bar.add_task(name, total=total))
