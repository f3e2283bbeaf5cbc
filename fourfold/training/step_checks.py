"""Stop after a step from which no training recovers."""

from __future__ import annotations

import math
from pathlib import Path

from fourfold.errors import UserError
from fourfold.training.job import StepResult


def check_step(result: StepResult, step: int, checkpoints: Path) -> None:
    """Raise ``UserError`` after a step without a trained token, or with a loss or gradient norm that is not finite.

    NaN gradients have made all weights NaN. Gradients that are not finite in a step that was skipped are no failure:
    the loss scale was too large, and has been halved. The loss itself is not scaled.
    """
    if result.kept_tokens.item() == 0:
        raise UserError(
            f"step {step + 1} has no token to learn: every document of its sequences is one token long, or its masks "
            "keep none"
        )
    for name, value in (("loss", result.loss.item()), ("gradient norm", result.grad_norm.item())):
        if not math.isfinite(value) and not (result.skipped and name == "gradient norm"):
            raise UserError(
                f"the {name} is {value} at step {step + 1}; lower optimizer.lr or lengthen "
                f"lr_scheduler.warmup_steps, and resume from the last checkpoint in {checkpoints}"
            )
