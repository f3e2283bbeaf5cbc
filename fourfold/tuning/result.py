"""Results of trials: what a layout did, for how much, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["done", "hopeless", "out of memory", "crashed", "hung", "refused"]
"""hopeless: ended early, after a few steps that were far slower than the best trial's; refused: not a legal run."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Result:
    """The outcome of one trial."""

    outcome: Outcome
    seconds: float | None = None
    """The median step; None where too few were taken."""
    noise: float = 0.0
    """Standard error of the logarithm of ``seconds``, from the spread of the trial's own steps."""
    memory_bytes: float | None = None
    """On a GPU what the fullest process needs, its allocations and the runtime's; on a CPU the most that one held in
    memory. None where it was not measured."""
    reason: str = ""
    """Why it ended before it was done."""
    wall_seconds: float = 0.0
    """The cost: from its start to its end."""

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES
        assert self.outcome != "done" or self.seconds is not None


@dataclass(frozen=True)
class Trial:
    """A layout that was tried: its index among the candidates, and its result."""

    index: int
    result: Result
    number: int = -1
    """In the ledger."""
