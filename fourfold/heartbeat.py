"""A process's signs of life, in memory that its watchdog reads: the step, and what it began to do last.

Everything that may take long calls ``doing``; it costs about a microsecond, and nothing without a watchdog.
"""

from __future__ import annotations

import mmap
import struct
import time
from typing import NamedTuple

SIZE = 512
"""Bytes of the memory."""

_HEAD = struct.Struct("<QQQd")


class Beat(NamedTuple):
    """The newest sign of life."""

    number: int
    """Signs of life so far."""
    steps_begun: int
    """Steps that this process has begun; the first one still belongs to the start-up."""
    step: int
    """The step, counted from 1; 0 before the first."""
    time: float
    """Seconds since 1970."""
    doing: str


class Heartbeat:
    """The memory, by the file descriptor that both processes have."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)
        self._count = self._begun = self._step = 0

    def begin_step(self, step: int) -> None:
        """Note that a step, counted from 0, begins."""
        self._begun += 1
        self._step = step + 1
        self.beat("reading the batch")

    def beat(self, doing: str) -> None:
        """Note what begins now."""
        self._count += 1
        text = doing.encode(errors="replace")[: SIZE - _HEAD.size - 1] + b"\0"
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, self._count, self._begun, self._step, time.time())

    def read(self) -> Beat:
        """The newest sign; for the watchdog."""
        text = self._memory[_HEAD.size :].partition(b"\0")[0].decode(errors="replace")
        number, begun, step, seconds = _HEAD.unpack_from(self._memory)
        return Beat(number, begun, step, seconds, text)


_current: Heartbeat | None = None


def watched(heartbeat: Heartbeat | None) -> None:
    """Have the signs of life of this process go to ``heartbeat``; None: nowhere."""
    global _current
    _current = heartbeat


def begin_step(step: int) -> None:
    """Note that a training step, counted from 0, begins."""
    if _current is not None:
        _current.begin_step(step)


def doing(what: str, axis: str = "") -> None:
    """Note what this process begins to do, and the axis of a collective."""
    if _current is not None:
        _current.beat(f"{what} (over {axis})" if axis else what)
