"""The order in which parts of a micro-batch take their steps; the layers and the planner follow it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Until(Enum):
    """Condition for a part's next step."""

    GATHERED = auto()
    """Its input is gathered; it computes with that."""
    SUMMED = auto()
    """The products of the last step are summed."""
    SUMMED_TO_GATHER = auto()
    """The same, where it starts the next gather without a product between."""
    OTHERS = auto()
    """All other parts of the micro-batch have reached the same point."""


Steps = Generator[Until, None, T]
"""Work in steps, with a result at the end."""


@dataclass(eq=False)
class _Part(Generic[T]):
    steps: Steps[T]
    index: int
    until: Until | None = None
    """Condition for its next step; None if it can go on at once."""
    products: int = -1
    """Steps with products that all parts together had taken when its last step ended."""


def in_turn(workers: Iterable[Steps[T]], runs_ahead: bool) -> list[T]:
    """Run all parts step by step, the part that has waited longest first; returns their results, in the same order.

    runs_ahead: prefer parts for which another has computed a product since they began to wait, and of these one that is
    about to gather, so that products hide its gather too.
    """
    waiting, results, products = [_Part(steps, index) for index, steps in enumerate(workers)], dict[int, T](), 0
    while waiting:
        if all(part.until is Until.OTHERS for part in waiting):
            for part in waiting:
                part.until = None
        part = _next(waiting, products) if runs_ahead else waiting[0]
        waiting.remove(part)
        has_input = part.until is Until.GATHERED
        try:
            part.until = next(part.steps)
        except StopIteration as end:
            results[part.index] = end.value
        else:
            waiting.append(part)
        if has_input or part.until in (Until.SUMMED, Until.SUMMED_TO_GATHER):
            products += 1
        part.products = products
    return [results[index] for index in sorted(results)]


def _next(waiting: list[_Part[T]], products: int) -> _Part[T]:
    able = [part for part in waiting if part.until is not Until.OTHERS]
    ready = [part for part in able if part.products < products or part.until is None]
    to_gather = [part for part in ready if part.until is Until.SUMMED_TO_GATHER]
    return (to_gather or ready or able)[0]
