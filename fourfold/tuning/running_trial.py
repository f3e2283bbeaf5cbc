"""Watch one running trial: enforce its time and memory limits, end it early if it is slow, and read its result."""

import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.config.run import RunConfig
from fourfold.exit_codes import HANG, REFUSED, ended_by
from fourfold.planning.machines.machine import Machine
from fourfold.tuning.trial_process import LOG, SUBMISSION, TrialProcess, kernel_kills
from fourfold.tuning.trial_result import TrialOutcome, TrialResult
from fourfold.tuning.trial_run import hopeless, measured, memory_used, step_seconds_of

RAN_OUT = re.compile(rb"OutOfMemoryError|out of memory|Cannot allocate memory|can't allocate memory|oom[-_]kill", re.I)
"""Matches the messages that PyTorch, memory allocators, and SLURM print when memory runs out."""
KEPT_OF_LOG = 1 << 16
"""Only this number of bytes at the end of a log is searched for messages."""
TIMES_AS_LONG, AT_LEAST = 5.0, 60.0
"""A trial counts as hung after ``TIMES_AS_LONG`` * t + ``AT_LEAST`` seconds. Here t is the wall time of the longest
finished trial, in seconds."""


@dataclass
class RunningTrial:
    """A running trial.

    - number: its number in the ledger.
    - index: the index of its layout among the candidates.
    - slot: its position among the concurrent trials. On GPUs, the slot selects the devices of the trial.
    - timeout: if the trial still runs this number of seconds after its start, it counts as hung.
    - memory_limit: bytes that one device may use, or on a CPU, bytes that one process may use. None sets no limit.
    """

    number: int
    index: int
    slot: int
    run: RunConfig
    folder: Path
    process: TrialProcess
    machine: Machine
    on_gpu: bool
    timeout: float
    memory_limit: float | None

    def __post_init__(self) -> None:
        self._started: float | None = None
        self._kills = kernel_kills()

    def result(self, best: float | None, longest: float | None) -> TrialResult | None:
        """Return the result, or None if the trial is still running. End the trial if it exceeds a limit or is far
        slower than the best trial.

        Args:
            best: Step time of the best trial so far, in seconds.
            longest: Wall time of the longest finished trial, in seconds.
        """
        if self._started is None and self.process.has_started():
            self._started = time.monotonic()
        code = self.process.exit_code()
        used = memory_used(self.folder, self.run, self.machine, self.on_gpu)
        if self.memory_limit is not None and used is not None and used > self.memory_limit:
            limit = f"--memory-limit allows {self.memory_limit / 1e9:.2f} GB"
            found: TrialResult | None = TrialResult("out of memory", reason=f"it used {used / 1e9:.2f} GB, but {limit}")
        elif code is None:
            found = self._hung(longest) or hopeless(self.folder, best)
        else:
            found = self._ended(code)
        if found is None:
            return None
        if code is None:
            self.process.end()
        return replace(found, wall_seconds=self._taken(), memory_bytes=used)

    def _hung(self, longest: float | None) -> TrialResult | None:
        """Return the result of a trial that has run too long, or None if its time is not up."""
        taken = self._taken()
        limit = self.timeout if longest is None else min(self.timeout, TIMES_AS_LONG * longest + AT_LEAST)
        if taken > limit:
            steps = len(step_seconds_of(self.folder))
            return TrialResult("hung", reason=f"not done after {taken:.0f} s, with {steps} steps taken")
        return None

    def _taken(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _ended(self, code: int) -> TrialResult:
        found = measured(self.folder, self.run, self.machine, self.on_gpu) if code == 0 else None
        if found is not None:
            return found
        reason = reason_in(self.folder / LOG) or reason_in(self.folder / SUBMISSION) or f"exit code {code}"
        return TrialResult(self._why(code), reason=reason)

    def _why(self, code: int) -> TrialOutcome:
        log = _end_of(self.folder / LOG)
        was_killed = code in (-signal.SIGKILL, ended_by(signal.SIGKILL)) or b"SIGKILL" in log
        if RAN_OUT.search(log) or (was_killed and kernel_kills() != self._kills):
            return "out of memory"
        return "refused" if code == REFUSED else "hung" if code == HANG else "crashed"


def reason_in(log: Path) -> str:
    """Return why a trial ended, according to its log, in at most 300 characters. If fourfold itself printed messages,
    return the last message. Otherwise return the last line of the log, such as the end of a traceback. Return an empty
    text if there is no log."""
    lines = [line.strip() for line in _end_of(log).decode("utf-8", "replace").splitlines() if line.strip()]
    ours = [line.removeprefix("fourfold: ") for line in lines if line.startswith("fourfold: ")]
    return (ours or lines or [""])[-1][:300]


def _end_of(log: Path) -> bytes:
    if not log.is_file():
        return b""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - KEPT_OF_LOG))
        return file.read()
