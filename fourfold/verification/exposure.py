"""Collectives of a step that have no computation to hide behind."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Line = tuple[str, str, str]
"""Axis, operation and purpose of a collective."""

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
"""Operations behind which a collective counts as hidden, besides attention: pointwise work is much shorter."""


class Flight(NamedTuple):
    """A collective that has been issued; ``products`` had been before it."""

    line: Line
    bytes: int
    products: int


class Flights:
    """Collectives from their issue to the moment from which the step cannot go on without their results.

    On a GPU a collective runs beside all computation that is issued in between. It is *exposed* where that holds no
    matrix product: nothing that takes time hides it.
    """

    def __init__(self) -> None:
        self.exposed: Counter[Line] = Counter()
        """Bytes."""
        self._products = 0
        self._flying: dict[int | Line, list[Flight]] = {}

    def start(self) -> None:
        """Forget what has been."""
        self.exposed.clear()
        self._flying.clear()

    def compute(self, operation: str) -> None:
        """Note an operation of the computation."""
        if operation in PRODUCTS or "attention" in operation or "attend" in operation:
            self._products += 1

    def issue(self, key: int | Line, line: Line, size: int) -> None:
        """Note a collective of ``size`` bytes; that of the same key and line before has landed.

        key: its result's storage, or its line. Two levels of a gather have the same result: they land together.
        """
        if any(flight.line == line for flight in self._flying.get(key, ())):
            self.land(key)
        self._flying.setdefault(key, []).append(Flight(line, size, self._products))

    def move(self, storage: int, other: int) -> None:
        """The result is in another storage than was said."""
        self._flying[other] = self._flying.pop(storage)

    def land(self, key: int | Line) -> None:
        """Note that the step waits for the collectives of a key, if there are any."""
        for flight in self._flying.pop(key, ()):
            if flight.products == self._products:
                self.exposed[flight.line] += flight.bytes

    def land_all(self) -> None:
        """Note that the step waits for every collective."""
        for key in list(self._flying):
            self.land(key)
