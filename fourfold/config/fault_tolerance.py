"""Settings of jobs that hang, fail, or run out of time."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict


class FaultToleranceConfig(Strict):
    """Hangs, restarts and limits of time ([reliability.md](reliability.md#hangs))."""

    timeout: float = Field(
        600, ge=0, description="Seconds without a sign of life after which a job counts as hung, and ends; 0: never."
    )
    startup_timeout: float = Field(1800, gt=0, description="The same until the first step is done, which may compile.")
    grace_period: float = Field(
        0, ge=0, description="Seconds after a stop signal in which the job must have saved; 0: as long as it takes."
    )
    max_restarts: int = Field(
        2,
        ge=0,
        description="Times that a job is started again, from its newest checkpoint, after failing at one and the same "
        "step. torchrun and SLURM restart jobs themselves; for them it limits the attempts at one step.",
    )
    failing_step: Literal["stop", "skip"] = Field(
        "stop",
        description="A step that has failed more often than that: stop ends the job and names it, skip leaves out its "
        "batch and goes on.",
    )
    max_wall_time: float = Field(
        0, ge=0, description="Minutes after which the job saves and stops, as at a stop signal; 0: no limit."
    )

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of collectives: longer than the watchdog's, whose report says more."""
        return timedelta(seconds=1.2 * self.timeout + 60 if self.timeout else 600)
