"""Compute the validation loss, remember the lowest one, and decide whether training ends because the loss no longer
improves."""

import math

from fourfold.checkpoints.saved_state import BestValidation
from fourfold.config.during_training import ValidationConfig
from fourfold.config.run import RunConfig
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.training.corpora import Corpora, micro_batches
from fourfold.training.job import Job


def validate(job: Job, corpora: Corpora) -> dict[str, float]:
    """Compute the mean loss of the validation batches, which are the same every time. Every process calls this.

    Returns:
        Metrics by name: ``validation_loss`` and, after the first update of a run that averages its weights, the loss of
        the averaged weights as ``ema_validation_loss``. If the run file has a section [dpo], also the metrics of
        ``Job.take_preferences``, with the prefix ``validation_``.
    """
    assert corpora.validation is not None, "open_corpora has made one"
    batches = [batch for step in range(job.run.validation.steps) for batch in corpora.validation.step(step)]
    mine = micro_batches(batches, job.run, job.grid.cp, job.device)
    found = {"validation_loss": job.evaluate(mine).item()}
    found = {**{f"validation_{name}": value for name, value in job.take_preferences().items()}, **found}
    if job.average is not None and job.average.has_begun:
        with job.averaged():
            found["ema_validation_loss"] = job.evaluate(mine).item()
            # Drop the metrics of the averaged weights, because they are not reported.
            job.take_preferences()
    # Return rank 0's losses on all ranks, because all ranks must make the same decisions from them.
    return decided_by_rank_0(lambda: found)


def note_validation(best: BestValidation, config: ValidationConfig, step: int, loss: float) -> bool:
    """Record a validation loss, and return whether it is a new lowest loss.

    The first finite loss is always a new lowest loss. A later loss must be lower by more than
    ``validation.min_improvement``.

    Args:
        best: Record of the lowest loss so far. This function updates it.
        config: The section [validation].
        step: Number of steps taken before the validation.
        loss: The validation loss. All ranks must pass the same value.
    """
    if not math.isfinite(loss) or (best.loss is not None and not loss < best.loss - config.min_improvement):
        best.since += 1
        return False
    best.loss, best.step, best.since = loss, step, 0
    return True


def is_exhausted(best: BestValidation, config: ValidationConfig) -> bool:
    """Return True if none of the last ``validation.patience`` validations had a new lowest loss. With
    ``patience`` = 0, return False."""
    return bool(config.patience) and best.since >= config.patience


def is_last_step(best: BestValidation, run: RunConfig, steps: int) -> bool:
    """Return True if training ends after ``steps`` steps. It ends if all steps are done, or if ``is_exhausted``."""
    return steps == run.training.train_steps or is_exhausted(best, run.validation)
