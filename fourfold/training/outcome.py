"""The outcome of a job. Nothing here imports torch: the parent of local workers receives it, and needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    run_dir: str
    steps: int
    """Optimizer steps behind the model, those before this job included."""
    loss: float | None
    """Loss of the last step that was not bad; None where no step was taken."""
    checkpoint: str | None
    """The newest one in the run's folder."""
    sample: str | None
    stopped: bool
    """A signal or the limit of time ended the job before its last step."""
    is_first_process: bool
