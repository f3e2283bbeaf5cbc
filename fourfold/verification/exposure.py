"""Find the collectives of a step that no computation hides."""

from collections import Counter
from typing import NamedTuple

Line = tuple[str, str, str]
"""The axis, the operation, and the purpose of a collective. Collectives that agree in all three are counted
together."""


class IssuedCollective(NamedTuple):
    """A collective that has been issued.

    ``matmuls`` is the number of matmuls that were issued before the collective, and ``computed`` is the total time of
    these matmuls. ``duration`` is the collective's own time, without waiting for earlier collectives on its axis.
    ``end`` is the time when the collective finishes. Times are in picoseconds.
    """

    line: Line
    bytes: int
    matmuls: int
    computed: int
    duration: int
    end: int


class Flights:
    """Tracks collectives from their issue to the moment when the step needs their results.

    On a GPU, a collective overlaps all computation that is issued between its start and its wait. If this computation
    contains no matmul (or attention, which counts as a matmul here), the collective is *exposed*. Pointwise operations
    are much shorter than matmuls and hide nothing. If durations are known, a collective is exposed for the time that
    the step waits for it. Collectives of one axis run one after the other, and collectives of different axes run
    concurrently. Times are in picoseconds.
    """

    def __init__(self, slowed: float = 0.0) -> None:
        """Start with an empty record.

        Args:
            slowed: How much a hidden collective slows down the computation that runs at the same time, as a fraction of
                the collective's duration.
        """
        self.exposed: Counter[Line] = Counter()
        """Number of exposed bytes by line."""
        self.taken: Counter[Line] = Counter()
        """Sum of the durations of the collectives, by line."""
        self.waited: Counter[Line] = Counter()
        """The time that each line of collectives adds to the step. The step waits for the collectives, or the
        collectives slow down the step's computation."""
        self._slowed = slowed
        self._matmuls = self._computed = self._now = 0
        self._free: Counter[str] = Counter()
        """For each axis, the time when its most recent collective ends. A group with two levels, inside nodes and
        across nodes, counts as one axis."""
        self._flying: dict[int | Line, list[IssuedCollective]] = {}

    def start(self) -> None:
        """Forget all collectives, in flight or finished."""
        for counter in (self.exposed, self.taken, self.waited, self._flying):
            counter.clear()

    def compute(self, duration: int = 0) -> None:
        """Record that the step issues a matmul or an attention operation. ``duration`` is the time of the operation."""
        self._matmuls += 1
        self._computed += duration
        self._now += duration

    def issue(self, key: int | Line, line: Line, size: int, duration: int = 0) -> None:
        """Record that a collective of ``size`` bytes is issued. If an earlier collective with the same key and line is
        still in flight, the step waits for it first.

        Args:
            key: The storage of the result, or the line. The step waits for all collectives with the same key at once.
                Both levels of a two-level gather have the same key, because they have the same result.
        """
        if any(flight.line == line for flight in self._flying.get(key, ())):
            self.land(key)
        flying = self._flying.setdefault(key, [])
        # A line may name levels of an axis, such as "z across nodes". The axis is the first word.
        axis = line[0].partition(" ")[0]
        self._free[axis] = end = max(self._now, self._free[axis]) + duration
        self.taken[line] += duration
        flying.append(IssuedCollective(line, size, self._matmuls, self._computed, duration, end))

    def move(self, storage: int, other: int) -> None:
        """Replace the key ``storage`` of collectives in flight by the key ``other``. From now on, waiting for ``other``
        means waiting for these collectives."""
        self._flying[other] = self._flying.pop(storage)

    def land(self, key: int | Line) -> None:
        """Record that the step waits for all collectives in flight with this key. Do nothing if there are none."""
        for flight in self._flying.pop(key, ()):
            if flight.matmuls == self._matmuls:
                self.exposed[flight.line] += flight.bytes
            wait = max(flight.end - self._now, 0)
            hidden = min(max(flight.duration - wait, 0), self._computed - flight.computed)
            wait += round(self._slowed * hidden)
            self.waited[flight.line] += wait
            self._now += wait

    def land_all(self) -> None:
        """Record that the step waits for every collective in flight."""
        for key in list(self._flying):
            self.land(key)
