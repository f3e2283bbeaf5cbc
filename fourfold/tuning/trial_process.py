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
PROC = Path("/proc")


class TrialProcess(Protocol):
    """A trial that is running, or waiting in a batch system's queue."""

    def has_started(self) -> bool:
        """Return whether the trial has started to run, and is no longer waiting in a queue."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the trial runs."""
        ...

    def held_bytes(self) -> float | None:
        """Return the most bytes that any running process of the trial has held so far, or None if unknown."""
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

    def held_bytes(self) -> float | None:
        return max(map(_resident_bytes, _members(self._process.pid)), default=None)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def kernel_kills() -> int | None:
    """Return how many processes the kernel has killed since boot because memory ran out, or None if unknown."""
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _members(group: int) -> list[int]:
    """Return the ids of the processes in a process group. The result is empty on a machine without /proc."""
    found = []
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # The process has ended.
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
    return found


def _resident_bytes(process: int) -> float:
    """Return the peak resident memory of a process in bytes, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(process) / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return 0.0
