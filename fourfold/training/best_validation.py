"""The lowest validation loss of a run: when it is reached, which checkpoint has it, and when waiting for it ends."""

from __future__ import annotations

import math

from fourfold.checkpoints.saved_state import BestValidation
from fourfold.config.during_training import ValidationConfig
from fourfold.config.run import RunConfig


def note_validation(best: BestValidation, config: ValidationConfig, step: int, loss: float) -> bool:
    """Note a validation after ``step`` steps; True where its loss is the lowest so far."""
    if not math.isfinite(loss) or (best.loss is not None and not loss < best.loss - config.min_improvement):
        best.since += 1
        return False
    best.loss, best.step, best.since = loss, step, 0
    return True


def is_exhausted(best: BestValidation, config: ValidationConfig) -> bool:
    """True where ``validation.patience`` validations in a row were no better than the best before them."""
    return bool(config.patience) and best.since >= config.patience


def is_last_step(best: BestValidation, run: RunConfig, steps: int) -> bool:
    """True where training ends after ``steps`` steps: the last of the run file, or nothing improves any longer."""
    return steps == run.training.train_steps or is_exhausted(best, run.validation)
