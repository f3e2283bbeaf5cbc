"""Exit codes of the commands, for scripts that decide whether to restart a job."""

from __future__ import annotations

DONE = 0
CRASH = 1
"""The cause is a bug or a failed machine."""
REFUSED = 2
"""The cause is a user's mistake. The same command will fail again."""
STOPPED = 3
"""The job was stopped by a signal or by max_wall_time, after saving. The same command continues the job."""
HANG = 4
"""The watchdog ended the job. The same command continues from the newest checkpoint."""


def ended_by(signum: int) -> int:
    """Return the exit code that shells report for a process that a signal has ended."""
    return 128 + signum
