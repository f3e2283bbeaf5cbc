"""Exit codes of the commands, for scripts that decide whether to restart a job."""

from __future__ import annotations

DONE = 0
"""The command has succeeded."""
CRASH = 1
"""The command has crashed, because of a bug or a failed machine."""
REFUSED = 2
"""The command was refused because of a user's mistake. The same command will fail again."""
STOPPED = 3
"""After a signal or after max_wall_time, the job has saved a checkpoint and stopped. The same command continues the
job."""
HANG = 4
"""The job hung, and the watchdog ended it. The same command continues the job from the newest checkpoint."""


def ended_by(signum: int) -> int:
    """Return the exit code that shells report for a process that was ended by a signal."""
    return 128 + signum
