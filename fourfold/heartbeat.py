"""Record the heartbeats of a process in memory that its watchdog reads. The newest heartbeat says what the process is
doing, so the watchdog can report where a hung process is stuck.

Code that may take a long time calls `doing` first. A call takes about a microsecond with a watchdog, and does nothing
without one.
"""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

GROUPS = 64
"""Number of process groups with their own entry in the shared memory. A grid has at most about thirty groups."""

_HEAD, _TEXT = struct.Struct("<QQQQd"), 512
_GROUP, _COUNT = struct.Struct("<Q56s"), struct.Struct("<Q")

SIZE = _HEAD.size + _TEXT + (GROUPS + 1) * _GROUP.size
"""Size of the shared memory in bytes."""


class Beat(NamedTuple):
    """The newest heartbeat."""

    number: int
    """Number of heartbeats so far."""
    steps_begun: int
    """Number of steps that this process has begun. The watchdog counts the first step as start-up."""
    signs_before_step: int
    """Number of heartbeats before the current step began."""
    step: int
    """Number of the current step, counted from 1. It is 0 before the first step."""
    time: float
    """Unix time of the heartbeat, in seconds."""
    doing: str
    """Description of the action that the process has begun."""
    entered: dict[str, int]
    """Number of collectives that this process has entered, by the name of the process group."""


class Heartbeat:
    """Heartbeats in memory that a process shares with its watchdog.

    Args:
        descriptor: File descriptor of the shared memory. The process and its watchdog use the same descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._count = self._begun = self._step = self._before = 0
        self._entered: dict[str, tuple[int, Iterator[int]]] = {}
        """For each group, the offset of its entry in the shared memory, and the counter of its collectives. The counter
        is an iterator, because two threads may increment it at the same time."""

    def begin_step(self, step: int) -> None:
        """Record that a training step begins. ``step`` is its number, counted from 0."""
        self._begun += 1
        self._step, self._before = step + 1, self._count
        self.beat("reading the batch")

    def join(self, group: str) -> tuple[int, Iterator[int]]:
        """Record that this process belongs to a process group. Return the offset of the group's entry in the shared
        memory, and the counter of the group's collectives."""
        if group not in self._entered:
            # The shared memory has ``GROUPS`` entries for groups with a name. All further groups share one entry
            # without a name.
            number = min(len(self._entered), GROUPS)
            place = _HEAD.size + _TEXT + number * _GROUP.size
            self._entered[group] = (place, itertools.count(1))
            _GROUP.pack_into(self._memory, place, 0, group.encode() if number < GROUPS else b"")
        return self._entered[group]

    def beat(self, doing: str, group: str = "") -> None:
        """Record the action that begins now.

        Args:
            doing: Description of the action.
            group: Name of the process group, if the action is a collective. This process must belong to the group.
        """
        self._count += 1
        if group:
            place, count = self._entered.get(group) or self.join(group)
            _COUNT.pack_into(self._memory, place, next(count))
        text = doing.encode(errors="replace")[: _TEXT - 1] + b"\0"
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, self._count, self._begun, self._step, self._before, time.time())

    def read(self) -> Beat:
        """Return the newest heartbeat. The watchdog calls this."""
        text = self._memory[_HEAD.size :].partition(b"\0")[0].decode(errors="replace")
        number, begun, step, before, seconds = _HEAD.unpack_from(self._memory)
        groups = _GROUP.iter_unpack(self._memory[_HEAD.size + _TEXT :])
        entered = {name.rstrip(b"\0").decode(errors="replace"): count for count, name in groups if name.strip(b"\0")}
        return Beat(number, begun, before, step, seconds, text, entered)


_current: Heartbeat | None = None


def send_signs_to(heartbeat: Heartbeat | None) -> None:
    """Record this process's heartbeats in `heartbeat` from now on. With None, stop recording."""
    global _current
    _current = heartbeat


def join(group: str) -> None:
    """Record that this process belongs to a process group. Call this before the group's first collective."""
    if _current is not None:
        _current.join(group)


def begin_step(step: int) -> None:
    """Record that a training step begins. ``step`` is its number, counted from 0."""
    if _current is not None:
        _current.begin_step(step)


def is_watched() -> bool:
    """Return whether a watchdog reads this process's heartbeats."""
    return _current is not None


def doing(what: str, axis: str = "", group: str = "") -> None:
    """Record the action that this process begins.

    Args:
        what: Description of the action.
        axis: Axis of the grid, if the action is a collective.
        group: Name of the process group, if the action is a collective. This process must belong to the group.
    """
    if _current is not None:
        _current.beat(f"{what} (over {axis})" if axis else what, group)
