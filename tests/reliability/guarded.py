"""Run one command with limits on time and memory, and report everything that it does but must not do."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import resource
import signal
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from command_line import exit_code

SECONDS = 20
BYTES = 3 << 30
"""Memory that the command may use on top of what the process has at its start."""
LONGEST_SENTENCE = 1500
PROGRAM = Path(__file__).parents[2] / "fourfold"


class TookTooLong(BaseException):
    """The time limit has passed. This is not an ``Exception``, so no code of the program catches it."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Stop the block after `SECONDS`, and let it allocate no more than `BYTES`."""

    def stop(signal_number: int, frame: object) -> NoReturn:
        raise TookTooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    previous = signal.signal(signal.SIGALRM, stop)
    # Print the stacks and exit if code outside Python hangs.
    faulthandler.dump_traceback_later(10 * SECONDS, exit=True)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, previous)


def listing(root: Path) -> set[str]:
    """Return every file and folder below a folder."""
    return {os.path.join(folder, name) for folder, inner, files in os.walk(root) for name in (*inner, *files)}


def finding(arguments: Sequence[object], codes: Sequence[int] = (0, 2)) -> str | None:
    """Run a command. Return None if it did only what it may do. Otherwise return one line that says what it did
    and where.
    """
    output, errors = io.StringIO(), io.StringIO()
    code = None
    try:
        with limits(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = exit_code(*arguments)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except TookTooLong as error:
        return f"took more than {SECONDS} s at {_where(error)}"
    except BaseException as error:  # any exception is a finding
        return f"{type(error).__name__} at {_where(error)}: {str(error)[:160]}"
    if code not in codes:
        return f"exit code {code}: {errors.getvalue()[-300:]}"
    sentences = [line for line in errors.getvalue().splitlines() if line.startswith("fourfold: ")]
    if code == 2 and not (len(sentences) == 1 and errors.getvalue().endswith(f"{sentences[0]}\n")):
        return f"not one sentence: {errors.getvalue()[-300:]}"
    if code == 2 and len(sentences[0]) > LONGEST_SENTENCE:
        return f"a sentence of {len(sentences[0])} characters: {sentences[0][:200]}"
    return None


def _where(error: BaseException) -> str:
    """Return two lines of an error's traceback: the innermost line of all, and the innermost line of fourfold."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PROGRAM)] or frames
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (frames[-1], own[-1]))


def same_kind(found: str) -> str:
    """Return a text that is equal for findings with the same cause."""
    return re.sub(r"\d+|'.*?'", "…", found.split(": ")[0])
