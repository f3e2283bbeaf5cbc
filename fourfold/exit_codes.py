"""Exit codes of the commands, for scripts that decide whether to start a job again."""

from __future__ import annotations

DONE = 0
CRASH = 1
"""A defect, or a machine that failed."""
REFUSED = 2
"""A user's mistake: the same command fails again."""
STOPPED = 3
"""Stopped by a signal or by max_wall_time, after saving: the same command continues."""
HANG = 4
"""Ended by the watchdog; the same command continues from the newest checkpoint."""


def ended_by(signum: int) -> int:
    """The code by which shells report a process that a signal has ended."""
    return 128 + signum
