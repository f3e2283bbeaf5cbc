"""Define the order in which batch parts take their steps. Both the layers and the planner follow it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Until(Enum):
    """The condition that a batch part's next step waits for."""

    GATHERED = auto()
    """The part's input is gathered. The next step runs a matmul on it."""
    SUMMED = auto()
    """The sums of the last step's matmuls are complete."""
    SUMMED_TO_GATHER = auto()
    """The sums of the last step's matmuls are complete. The next step directly starts an all-gather, with no matmul in
    between."""
    ALL_PARTS = auto()
    """All parts of the micro-batch have reached this point."""


Steps = Generator[Until, None, T]
"""Work that is done in steps. The generator returns the result."""


@dataclass(eq=False)
class _Part(Generic[T]):
    steps: Steps[T]
    index: int
    until: Until | None = None
    """Condition that the part's next step waits for. None if the part can continue immediately."""
    matmuls: int = -1
    """Number of steps with matmuls, summed over all parts, when this part's last step ended."""


def run_batch_parts(workers: Iterable[Steps[T]], runs_ahead: bool) -> list[T]:
    """Run all batch parts step by step. The part that has waited the longest goes first.

    Args:
        workers: The steps of each part.
        runs_ahead: Whether to prefer parts during whose wait another part has run a matmul. Among these parts, a part
            that is about to start an all-gather goes first, so that matmuls hide its all-gather too.

    Returns:
        The results of the parts, in the order of `workers`.
    """
    waiting, results, matmuls = [_Part(steps, index) for index, steps in enumerate(workers)], dict[int, T](), 0
    while waiting:
        if all(part.until is Until.ALL_PARTS for part in waiting):
            for part in waiting:
                part.until = None
        part = _next(waiting, matmuls) if runs_ahead else waiting[0]
        waiting.remove(part)
        has_input = part.until is Until.GATHERED
        try:
            part.until = next(part.steps)
        except StopIteration as end:
            results[part.index] = end.value
        else:
            waiting.append(part)
        if has_input or part.until in (Until.SUMMED, Until.SUMMED_TO_GATHER):
            matmuls += 1
        part.matmuls = matmuls
    return [results[index] for index in sorted(results)]


def _next(waiting: list[_Part[T]], matmuls: int) -> _Part[T]:
    able = [part for part in waiting if part.until is not Until.ALL_PARTS]
    ready = [part for part in able if part.matmuls < matmuls or part.until is None]
    to_gather = [part for part in ready if part.until is Until.SUMMED_TO_GATHER]
    return (to_gather or ready or able)[0]
