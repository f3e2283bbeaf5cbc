"""Scale the loss so that small gradients do not underflow in fp16 (Micikevicius et al. 2017, arXiv 1710.03740)."""

from dataclasses import dataclass

from fourfold.config.during_training import LossScalingConfig
from fourfold.errors import UserError

SMALLEST = 2.0**-14


@dataclass
class LossScale:
    """The factor on the loss. It halves when a gradient overflows, and doubles after ``growth_interval`` steps without
    an overflow."""

    config: LossScalingConfig
    scale: float
    steps_since_change: int = 0

    def update(self, overflowed: bool) -> None:
        """Adjust the scale after a step. ``overflowed`` says whether the step's gradients overflowed.

        Raises:
            UserError: Gradients overflow even at the smallest scale, so the run has diverged.
        """
        self.steps_since_change += 1
        if overflowed:
            self.scale, self.steps_since_change = self.scale / 2, 0
            if self.scale < SMALLEST:
                raise UserError(
                    f"gradients overflow fp16 even at the loss scale {SMALLEST}: the run has diverged; lower "
                    "optimizer.lr or lengthen lr_scheduler.warmup_steps, or train with training.precision = 'bf16'"
                )
        elif self.steps_since_change >= self.config.growth_interval:
            self.scale, self.steps_since_change = self.scale * 2, 0
