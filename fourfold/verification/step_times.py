"""Split the time of a step into computation, exposed collectives, and hidden collectives. Spans are in µs."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

Span = tuple[float, float]
"""Start and end of a time span, in µs."""

SpanOfAxis = tuple[str, Span]
"""An axis and a span in which one of its collectives is active."""


@dataclass(frozen=True)
class AxisTimes:
    """How long the collectives of one axis of the grid take in a step, in seconds on one process."""

    issued: float
    """Time during which at least one collective is in flight."""
    hidden: float
    """Time during which at least one collective is in flight while the process computes."""
    exposed: float
    """On a CPU, the time spent issuing collectives or waiting for them. On a GPU, the time with a collective in flight
    and no computation."""


@dataclass(frozen=True)
class StepTimes:
    """How the time of a step is divided, in seconds on one process. The total is ``seconds``, the sum of ``compute``,
    ``exposed``, and ``idle``. ``exposed`` is the time with an exposed collective on any axis (see ``AxisTimes``)."""

    seconds: float
    compute: float
    exposed: float
    idle: float
    """Time without computation and without exposed collectives: reading data, Python, or waiting for another device."""
    axes: dict[str, AxisTimes]

    @classmethod
    def of(
        cls, window: Span, parts: int, compute: Iterable[Span], flights: list[SpanOfAxis], held: list[SpanOfAxis] | None
    ) -> Self:
        """Split the time of several steps, and return the mean of one step.

        Args:
            window: Start and end of all steps.
            parts: Number of steps.
            compute: Spans of computation.
            flights: Spans with a collective in flight, each with its axis.
            held: Spans in which a collective kept the process from computing. If None, these are all spans with a
                collective in flight and no computation.
        """
        computing = _both(_union(compute), [window])

        def union_of(spans: list[SpanOfAxis], axis: str | None) -> list[Span]:
            return _both(_union(span for each, span in spans if axis in (None, each)), [window])

        def exposed_of(axis: str | None) -> list[Span]:
            return _without(union_of(flights, axis), computing) if held is None else union_of(held, axis)

        def seconds(spans: list[Span]) -> float:
            return sum(end - start for start, end in spans) / 1e6 / parts

        exposed = exposed_of(None)
        computing = _without(computing, exposed)
        axes = {}
        for axis in dict.fromkeys(axis for axis, _ in flights):
            issued = union_of(flights, axis)
            axes[axis] = AxisTimes(seconds(issued), seconds(_both(issued, computing)), seconds(exposed_of(axis)))
        idle = _without(_without([window], computing), exposed)
        return cls(seconds([window]), seconds(computing), seconds(exposed), seconds(idle), axes)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap or touch. Return the merged spans in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif start < end:
            found.append((start, end))
    return found


def _both(first: list[Span], second: list[Span]) -> list[Span]:
    """Return the spans that both lists cover. In each list, spans are sorted and do not touch."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return the parts of ``spans`` that ``others`` does not cover."""
    edges = [-float("inf"), *(edge for span in others for edge in span), float("inf")]
    return _both(spans, list(pairwise(edges))[::2])
