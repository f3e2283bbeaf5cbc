"""Store results of trials: how a layout performed, what the trial cost, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["done", "hopeless", "out of memory", "crashed", "hung", "refused"]
"""The ways in which a trial can end. "hopeless" trials ended early, because their first steps were far slower than the
best trial's steps. "refused" trials are not legal runs."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Result:
    """The outcome of one trial."""

    outcome: Outcome
    seconds: float | None = None
    """Median step time in seconds. None if there were too few steps."""
    noise: float = 0.0
    """Standard error of the logarithm of ``seconds``. It is estimated from how much the steps of this trial differ."""
    memory_bytes: float | None = None
    """On a GPU, the number of bytes that the process with the most memory allocated, plus the runtime's memory. On a
    CPU, the largest number of bytes that one process held. None if it was not measured."""
    reason: str = ""
    """Why the trial ended before it was done."""
    wall_seconds: float = 0.0
    """Number of seconds from the start to the end of the trial, which is its cost."""

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES
        assert self.outcome != "done" or self.seconds is not None


@dataclass(frozen=True)
class Trial:
    """A layout that was tried: its index among the candidates, and its result."""

    index: int
    result: Result
    number: int = -1
    """Number of the trial in the ledger."""
