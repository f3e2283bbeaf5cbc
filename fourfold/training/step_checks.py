"""Stop after a step from which no training recovers."""

from __future__ import annotations

import math
from pathlib import Path

from fourfold.errors import UserError
from fourfold.training.job import StepResult


def check_step(result: StepResult, step: int, checkpoints: Path) -> None:
    """Raise ``UserError`` after a step without a trained token, or with a loss or gradient norm that is not finite.

    NaN gradients have made all weights NaN. A skipped step is no failure: its loss scale was too large, and is halved.
    """
    if result.kept_tokens.item() == 0:
        raise UserError(
            f"step {step + 1} has no token to learn: every document of its sequences is one token long, or its masks "
            "keep none"
        )
    for name, value in (("loss", result.loss.item()), ("gradient norm", result.grad_norm.item())):
        if not math.isfinite(value) and not result.skipped:
            raise UserError(
                f"the {name} is {value} at step {step + 1}; lower optimizer.lr or lengthen "
                f"lr_scheduler.warmup_steps, and resume from the last checkpoint in {checkpoints}"
            )
