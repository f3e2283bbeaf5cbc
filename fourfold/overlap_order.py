"""Choose which batch part runs its next step. Both the layers and the planner use this order.

With `overlap.batch_parts`, a micro-batch is split into parts. While a collective of one part runs, another part
computes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Until(Enum):
    """A condition that a batch part's next step waits for."""

    GATHERED = auto()
    """The all-gather of the part's input is complete. The next step multiplies this input."""
    SUMMED = auto()
    """The ranks have summed the partial results of the matmuls in the part's previous step."""
    SUMMED_TO_GATHER = auto()
    """The ranks have summed the partial results, as with ``SUMMED``. The next step then starts an all-gather
    immediately, with no matmul before it."""
    ALL_PARTS = auto()
    """All parts of the micro-batch have reached this point."""


Steps = Generator[Until, None, T]
"""Work that is split into steps. The generator yields after each step, and returns the result."""


@dataclass(eq=False)
class _Part(Generic[T]):
    steps: Steps[T]
    index: int
    until: Until | None = None
    """Condition that the part's next step waits for. None if the part can continue immediately."""
    matmuls: int = -1
    """Number of matmul steps that all parts together had run when this part's most recent step ended."""


def run_batch_parts(workers: Iterable[Steps[T]], runs_ahead: bool) -> list[T]:
    """Run all batch parts step by step. Usually, the part that has waited the longest runs next.

    Args:
        workers: The steps of each part.
        runs_ahead: Whether a part may run out of turn to hide more communication. If False, the parts take turns. If
            True, a part that has started a collective waits until another part has run a matmul, which hides the
            collective. If all parts wait for such a matmul, one of them runs anyway. If several parts can run, a part
            that starts an all-gather next runs first, so that matmuls also hide this all-gather.

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
