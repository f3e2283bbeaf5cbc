"""Define the results of trials: how a layout performed, what the trial cost, and why it ended."""

from dataclasses import dataclass
from typing import Literal, get_args

TrialOutcome = Literal["done", "hopeless", "out of memory", "crashed", "hung", "refused"]
"""Ways in which a trial can end. A "hopeless" trial was ended early, because its first steps were far slower than the
best trial's steps. A "refused" trial ended with a ``UserError``, for example because its run file is illegal."""
OUTCOMES: tuple[TrialOutcome, ...] = get_args(TrialOutcome)


@dataclass(frozen=True)
class TrialResult:
    """The outcome and the measurements of one trial."""

    outcome: TrialOutcome
    seconds: float | None = None
    """Median step time in seconds. None if the trial took too few steps."""
    noise: float = 0.0
    """Standard error of the logarithm of ``seconds``, estimated from the variation between the trial's steps."""
    memory_bytes: float | None = None
    """Peak memory in bytes (``trial_run.memory_used``). None if no step was recorded."""
    reason: str = ""
    """Why the trial ended early. Empty if the outcome is "done"."""
    wall_seconds: float = 0.0
    """Wall time of the trial in seconds."""

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES
        assert self.outcome != "done" or self.seconds is not None


@dataclass(frozen=True)
class Trial:
    """A layout that was tried: its index among the candidates, and its result."""

    index: int
    result: TrialResult
    number: int = -1
    """Number of the trial in the ledger."""
