"""Train on one process of a job, with the callbacks that the run file asks for."""

from __future__ import annotations

from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.reports.live_report import LiveReport
from fourfold.training.outcome import Outcome
from fourfold.training.trainer import CallbackMaker, train


def train_with_callbacks(place: Place, run: RunConfig, profile: bool) -> Outcome:
    """Train the model of a run file. Every process of the job calls this.

    Args:
        place: The rank of this process, and the size of the job.
        run: The run file.
        profile: Whether to profile a few steps. The traces are in the folder ``profile`` of the run's folder.

    Returns:
        The outcome of this process.
    """
    callbacks: list[CallbackMaker] = []  # Import callbacks only if the run needs them.
    if run.audit.interval:
        from fourfold.memorization.in_training import CanaryAudit

        callbacks.append(CanaryAudit)
    if run.evaluation.interval:
        from fourfold.evaluation.tasks_in_training import TasksInTraining

        callbacks.append(TasksInTraining)
    if profile:
        from fourfold.verification.timeline import Timeline

        callbacks.append(Timeline)
    callbacks.append(LiveReport)  # Add the report last: it shows the other callbacks' results.
    return train(place, run, callbacks)
