"""Exit codes of the commands, for scripts that decide whether to restart a job."""

from __future__ import annotations

DONE = 0
"""The command has succeeded."""
CRASH = 1
"""The command has crashed, because of a bug or a failed machine."""
REFUSED = 2
"""The command was refused because of a user's mistake. The same command will fail again."""
STOPPED = 3
"""The job has saved and stopped after a signal or after max_wall_time. The same command continues it."""
HANG = 4
"""The watchdog ended the job. The same command continues from the newest checkpoint."""


def ended_by(signum: int) -> int:
    """Return the exit code that shells report for a process that was ended by a signal."""
    return 128 + signum
