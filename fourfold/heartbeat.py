"""A process's signs of life, in memory that its watchdog reads: the step, and what it began to do last.

Everything that may take long calls ``doing``; it costs about a microsecond, and nothing without a watchdog.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

GROUPS = 64
"""Process groups that have room in the memory; a grid has at most about thirty."""

_HEAD, _TEXT = struct.Struct("<QQQQd"), 512
_GROUP, _COUNT = struct.Struct("<Q56s"), struct.Struct("<Q")

SIZE = _HEAD.size + _TEXT + (GROUPS + 1) * _GROUP.size
"""Bytes of the memory."""


class Beat(NamedTuple):
    """The newest sign of life."""

    number: int
    """Signs of life so far."""
    steps_begun: int
    """Steps that this process has begun; the first one still belongs to the start-up."""
    signs_before_step: int
    """Signs of life before the step began."""
    step: int
    """The step, counted from 1; 0 before the first."""
    time: float
    """Seconds since 1970."""
    doing: str
    entered: dict[str, int]
    """Collectives that this process has entered, by process group."""


class Heartbeat:
    """The memory, by the file descriptor that both processes have."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._count = self._begun = self._step = self._before = 0
        self._entered: dict[str, tuple[int, Iterator[int]]] = {}
        """The place of each group in the memory, and the count, which two threads may draw from at once."""

    def begin_step(self, step: int) -> None:
        """Note that a step, counted from 0, begins."""
        self._begun += 1
        self._step, self._before = step + 1, self._count
        self.beat("reading the batch")

    def join(self, group: str) -> tuple[int, Iterator[int]]:
        """Note that this process is in a group, unless that is known."""
        if group not in self._entered:
            number = min(len(self._entered), GROUPS)  # more groups share a nameless last place, which no report reads
            place = _HEAD.size + _TEXT + number * _GROUP.size
            self._entered[group] = (place, itertools.count(1))
            _GROUP.pack_into(self._memory, place, 0, group.encode() if number < GROUPS else b"")
        return self._entered[group]

    def beat(self, doing: str, group: str = "") -> None:
        """Note what begins now: a collective if a group is named, by a name that only its members use."""
        self._count += 1
        if group:
            place, count = self._entered.get(group) or self.join(group)
            _COUNT.pack_into(self._memory, place, next(count))
        text = doing.encode(errors="replace")[: _TEXT - 1] + b"\0"
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, self._count, self._begun, self._step, self._before, time.time())

    def read(self) -> Beat:
        """The newest sign; for the watchdog."""
        text = self._memory[_HEAD.size :].partition(b"\0")[0].decode(errors="replace")
        number, begun, step, before, seconds = _HEAD.unpack_from(self._memory)
        groups = _GROUP.iter_unpack(self._memory[_HEAD.size + _TEXT :])
        entered = {name.rstrip(b"\0").decode(errors="replace"): count for count, name in groups if name.strip(b"\0")}
        return Beat(number, begun, before, step, seconds, text, entered)


_current: Heartbeat | None = None


def watched(heartbeat: Heartbeat | None) -> None:
    """Have the signs of life of this process go to ``heartbeat``; None: nowhere."""
    global _current
    _current = heartbeat


def join(group: str) -> None:
    """Note that this process is in a group, before it enters a collective of it."""
    if _current is not None:
        _current.join(group)


def begin_step(step: int) -> None:
    """Note that a training step, counted from 0, begins."""
    if _current is not None:
        _current.begin_step(step)


def is_watched() -> bool:
    """Return whether the signs of life of this process go anywhere."""
    return _current is not None


def doing(what: str, axis: str = "", group: str = "") -> None:
    """Note what this process begins to do, and the axis and the group of a collective."""
    if _current is not None:
        _current.beat(f"{what} (over {axis})" if axis else what, group)
