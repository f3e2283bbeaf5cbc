"""How far a long preparation has come, on stderr: a bar on a terminal, else a plain line now and then."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Progress of one named task over `total` bytes; a context manager."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._bar = _terminal_bar() if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._task = self._bar.add_task(self._name, total=self._total)
            self._bar.start()
        self._last_line = time.monotonic()
        return self

    def advance(self, count: int) -> None:
        """Say that `count` more bytes are done."""
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._name}: {self._done / 1e6:.0f} of {self._total / 1e6:.0f} MB", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _terminal_bar() -> "Bar":
    from rich import progress  # slow to import, and only a terminal needs it
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
