"""The processes of one trial on this machine: a process group of their own, which is watched, and ended as one."""

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
"""Everything that a trial prints, in its folder."""
SUBMISSION = "submission.txt"
"""File of the messages with which a batch system refuses a trial."""
PROC = Path("/proc")


class TrialProcess(Protocol):
    """A trial that runs, or waits in a queue."""

    def has_started(self) -> bool:
        """False while it waits."""
        ...

    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        ...

    def held_bytes(self) -> float | None:
        """The most bytes that one of its processes has held so far; None where that cannot be seen."""
        ...

    def end(self) -> None:
        """End all its processes, at once."""
        ...


class LocalTrial:
    """``fourfold train`` on this machine, in a process group of its own, which ends with this process."""

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
    """Processes that the kernel of this machine has ended for lack of memory, since it started; None if unknown."""
    with contextlib.suppress(OSError):
        for line in (PROC / "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _members(group: int) -> list[int]:
    """The processes of a group; none where the machine has no /proc."""
    found = []
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
    return found


def _resident_bytes(process: int) -> float:
    """The most that a process has held in memory; zero where it has ended."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(process) / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return 0.0
