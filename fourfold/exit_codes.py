"""Exit codes of the commands, for scripts that decide whether to restart a job."""

from __future__ import annotations

DONE = 0
CRASH = 1
"""A bug, or a machine that failed."""
REFUSED = 2
"""A user's mistake. The same command will fail again."""
STOPPED = 3
"""Stopped by a signal or by max_wall_time, after saving. The same command continues the job."""
HANG = 4
"""Ended by the watchdog. The same command continues from the newest checkpoint."""


def ended_by(signum: int) -> int:
    """Return the exit code that shells report for a process ended by a signal."""
    return 128 + signum
