"""The outcome of a training job. This module must not import torch, because the process that starts local workers runs
without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training job on one process."""

    run_dir: str
    """The run's folder."""
    steps: int
    """Number of optimizer steps taken, including steps before this job."""
    loss: float | None
    """Loss of the last step of this job that passed the checks. None if no step passed the checks."""
    checkpoint: str | None
    """The newest checkpoint in the run's folder. None if the folder has no checkpoint."""
    sample: str | None
    """Sample text that the model generated. None if the run file has no ``sample.prompt``, or if the job was
    stopped."""
    stopped: bool
    """Whether a signal or the time limit ended the job before its last step."""
    is_first_process: bool
    """Whether this process has rank 0."""
