"""Run the processes of one trial on this machine, in their own process group, which is watched and ended as a unit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from fourfold.processes import end_with_starter

LOG = "log.txt"
"""Name of the log in the trial's folder, which gets everything that the trial prints."""
SUBMISSION = "submission.txt"
"""Name of the file in the trial's folder that gets the batch system's error messages, for example if it refuses a
job."""


class TrialProcess(Protocol):
    """A trial that is running, or waiting in a batch system's queue."""

    def has_started(self) -> bool:
        """Return whether the trial has started to run, and is no longer waiting in a queue."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the trial runs."""
        ...

    def end(self) -> None:
        """End all processes of the trial immediately."""
        ...


class LocalTrial:
    """A trial that runs ``fourfold train`` on this machine, in its own process group. On Linux, it ends if this process
    ends."""

    def __init__(self, run_file: Path, folder: Path, environment: Mapping[str, str]) -> None:
        with (folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fourfold", "train", str(run_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | dict(environment),
                preexec_fn=end_with_starter,
            )

    def has_started(self) -> bool:
        return True

    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def kernel_kills() -> int | None:
    """Return how many processes the kernel has killed since boot because memory ran out, or None if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
