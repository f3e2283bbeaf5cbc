"""Handle signals that ask a job to save and stop: from Ctrl-C, a closed terminal, or a scheduler."""

import math
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RELAYED_INTERRUPT = signal.SIGUSR2
"""The parent sends this signal to its local workers after a Ctrl-C. The workers ignore the SIGINT that the terminal
sends them directly."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, RELAYED_INTERRUPT)

SAME_CTRL_C_SECONDS = 0.5
"""If a launcher started the job, a second Ctrl-C within this many seconds is ignored, because both the terminal and the
launcher may deliver the same Ctrl-C."""

SAVING = b"\nfourfold: saving a checkpoint after this step; press Ctrl-C again to stop without saving\n"


class StopRequest:
    """Says whether the job should save and stop.

    The job should stop after the first stop signal, and after the time limit. A Ctrl-C after another stop signal raises
    KeyboardInterrupt.

    Args:
        announce: Whether to print a message after a Ctrl-C.
        launched: Whether a launcher may deliver a Ctrl-C twice.
        seconds: Time limit in seconds from now. 0 means no limit.
    """

    def __init__(self, announce: bool, launched: bool, seconds: float = 0) -> None:
        self._announce, self._launched = announce, launched
        self._deadline = time.monotonic() + seconds if seconds else math.inf
        self._received = False
        self._interrupted_at: float | None = None

    @property
    def is_set(self) -> bool:
        """Return whether the job should save and stop."""
        return self._received or time.monotonic() >= self._deadline

    def receive(self, signum: int, frame: FrameType | None) -> None:
        """Handle a stop signal."""
        if signum == signal.SIGHUP:
            leave_terminal()
        if signum in (signal.SIGINT, RELAYED_INTERRUPT):
            now = time.monotonic()
            if self._launched and self._interrupted_at is not None and now - self._interrupted_at < SAME_CTRL_C_SECONDS:
                return
            if self._received:
                raise KeyboardInterrupt
            # Record the signal before the message is written, because a second signal may interrupt the writing.
            self._interrupted_at, self._received = now, True
            if self._announce:
                os.write(2, SAVING)  # Do not use print, because the signal may have interrupted a print.
        self._received = True


@contextmanager
def stop_request(announce: bool = True, launched: bool = False, seconds: float = 0) -> Iterator[StopRequest]:
    """Handle stop signals while the `with` block runs. Signals that were held back before are handled too.

    Signals that the process ignores, for example after nohup, stay ignored.

    Args:
        announce: See `StopRequest`.
        launched: See `StopRequest`.
        seconds: See `StopRequest`.

    Yields:
        The object that says whether the job should stop.
    """
    request = StopRequest(announce, launched, seconds)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, request.receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_stop_signals() -> Iterator[None]:
    """Hold back stop signals in this `with` block, until `stop_request` receives them. Otherwise a signal would end the
    program silently."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_terminal() -> None:
    """Discard all further output to the terminal. After a terminal is closed, writing to it would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
