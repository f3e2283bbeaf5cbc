"""The section [checks] of the run file."""

from typing import Literal

from pydantic import Field

from fourfold.config.strict import Strict


class ChecksConfig(Strict):
    """Checks of each step's loss and gradients before the update is applied
    ([reliability.md](reliability.md#bad-numbers))."""

    non_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """What to do if a loss or gradient norm is not finite. `stop` ends the run. `skip` skips the step's update.
    `roll_back` returns to the newest checkpoint, and skips the bad batch when it repeats the steps. If gradients
    overflow in fp16, [loss_scaling](#loss_scaling) handles the overflow instead."""
    spike: Literal["off", "stop", "skip", "roll_back"] = "off"
    """What to do if a loss or gradient norm is far above its values in previous steps. `off` ignores spikes. The other
    choices mean the same as for `non_finite`."""
    spike_sigma: float = Field(6.0, gt=0)
    """A value is a spike if it is more than this many standard deviations above its mean over the last `spike_window`
    good steps."""
    spike_window: int = Field(128, ge=2)
    """Number of recent good steps that a value is compared with. Before the run has had this many good steps, no value
    counts as a spike."""
    roll_back_batches: int = Field(1, ge=1)
    """Number of batches to skip after a roll-back: the bad batch and the batches right before it."""
    max_in_a_row: int = Field(10, ge=1)
    """Largest number of consecutive bad steps that are skipped or rolled back. One more bad step ends the run."""
    replay_interval: int = Field(0, ge=0)
    """Number of steps between checks for [silent corruption](reliability.md#silent-corruption). A check computes the
    gradients twice, compares the two results bit for bit, and compares all replicas of the weights. 0 disables these
    checks."""
