"""The section [fault_tolerance] of the run file: settings for jobs that hang, fail, or run out of time."""

from datetime import timedelta
from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict


class FaultToleranceConfig(Strict):
    """Hangs, restarts, and time limits ([reliability.md](reliability.md#hangs))."""

    timeout: float = Field(600, ge=0)
    """If the job makes no progress for this many seconds, it counts as hung and is stopped. 0 turns the watchdog
    off."""
    startup_timeout: float = Field(1800, gt=0)
    """Until the first step is done, this number of seconds replaces `timeout`, because the first step may include
    compilation."""
    grace_period: float = Field(0, ge=0)
    """If the job has not saved a checkpoint this many seconds after a stop signal, the job ends without a checkpoint. 0
    sets no limit."""
    max_restarts: int = Field(2, ge=0)
    """How many times the job may restart from the newest checkpoint if the same step keeps failing. Restarts by
    torchrun or SLURM count too."""
    failing_step: Literal["stop", "skip"] = "stop"
    """What to do if a step fails more than `max_restarts` times. `stop` ends the job and names the step. `skip` leaves
    the step's batch out and continues."""
    max_wall_time: float = Field(0, ge=0)
    """Save a checkpoint and stop after this many minutes, as after a stop signal. 0 sets no limit."""

    @property
    def group_timeout(self) -> timedelta:
        """Return the timeout of collectives.

        A collective times out later than the watchdog, so the watchdog reports a hang first. The watchdog's report says
        more than the error of a collective. If the watchdog is off, collectives time out after 600 s.
        """
        return timedelta(seconds=1.2 * self.timeout + 60 if self.timeout else 600)
