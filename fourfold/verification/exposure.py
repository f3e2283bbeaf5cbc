"""Collectives of a step that have no computation to hide behind."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Line = tuple[str, str, str]
"""Axis, operation and purpose of a collective."""


class IssuedCollective(NamedTuple):
    """A collective that has been issued.

    products, computed: the products before it, and the time that they took; duration: its own, without those before it
    on its axis; end: when it is done.
    """

    line: Line
    bytes: int
    products: int
    computed: int
    duration: int
    end: int


class Flights:
    """Collectives from their issue to the moment from which the step cannot go on without their results.

    On a GPU a collective runs beside all computation that is issued in between. It is *exposed* where that holds no
    matrix product: nothing that takes time hides it. Where durations are known, it is exposed for as long as the step
    waits: collectives of one axis run one after the other, those of several axes beside each other. Pointwise
    operations, which are much shorter than products, hide nothing.
    """

    def __init__(self, slowed: float = 0.0) -> None:
        """slowed: the time that a hidden collective adds to the computation beside it, as a share of its own."""
        self.exposed: Counter[Line] = Counter()
        """Bytes."""
        self.taken: Counter[Line] = Counter()
        """The sums of durations."""
        self.waited: Counter[Line] = Counter()
        """For how long the step waits."""
        self._slowed = slowed
        self._products = self._computed = self._now = 0
        self._free: Counter[str] = Counter()
        """When the last collective of an axis ends; the two levels of a shard group take turns."""
        self._flying: dict[int | Line, list[IssuedCollective]] = {}

    def start(self) -> None:
        """Clear the record."""
        for counter in (self.exposed, self.taken, self.waited, self._flying):
            counter.clear()

    def compute(self, duration: int = 0) -> None:
        """Note a product or an attention."""
        self._products += 1
        self._computed += duration
        self._now += duration

    def issue(self, key: int | Line, line: Line, size: int, duration: int = 0) -> None:
        """Note a collective of ``size`` bytes; that of the same key and line before has landed.

        key: its result's storage, or its line. Two levels of a gather have the same result: they land together.
        """
        if any(flight.line == line for flight in self._flying.get(key, ())):
            self.land(key)
        flying = self._flying.setdefault(key, [])
        axis = line[0].partition(" ")[0]  # "z" of "z across nodes"
        self._free[axis] = end = max(self._now, self._free[axis]) + duration
        self.taken[line] += duration
        flying.append(IssuedCollective(line, size, self._products, self._computed, duration, end))

    def move(self, storage: int, other: int) -> None:
        """The result is in another storage than was given to ``issue``."""
        self._flying[other] = self._flying.pop(storage)

    def land(self, key: int | Line) -> None:
        """Note that the step waits for the collectives of a key, if there are any."""
        for flight in self._flying.pop(key, ()):
            if flight.products == self._products:
                self.exposed[flight.line] += flight.bytes
            wait = max(flight.end - self._now, 0)
            hidden = min(max(flight.duration - wait, 0), self._computed - flight.computed)
            wait += round(self._slowed * hidden)
            self.waited[flight.line] += wait
            self._now += wait

    def land_all(self) -> None:
        """Note that the step waits for every collective."""
        for key in list(self._flying):
            self.land(key)
