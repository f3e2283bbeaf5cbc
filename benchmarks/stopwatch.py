"""Measure when each operation of a pipeline begins and ends, with CUDA events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.pipeline_times import Span
from fourfold.parallel.pipeline.pipeline import Pipeline
from fourfold.parallel.pipeline.schedule import Op


class Stopwatch:
    """Record when the pipeline operations of one process begin and end. On a GPU, recording does not make the host
    wait. Only ``spans`` and ``waits`` wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Op, Any, Any]] = []
        """Operations with their begin and end, in seconds or as CUDA events."""
        self._waits: list[tuple[Op, Any, Any]] = []

    def attach(self, pipeline: Pipeline) -> None:
        """Time the operations of a pipeline from now on."""
        pipeline.around_operation, pipeline.around_wait = self.span, self.wait

    def start(self) -> None:
        """Clear the recorded times."""
        self._spans, self._waits = [], []

    @contextmanager
    def span(self, op: Op) -> Iterator[None]:
        """Time an operation."""
        begin = self._now()
        yield
        self._spans.append((op, begin, self._now()))

    @contextmanager
    def wait(self, op: Op) -> Iterator[None]:
        """Time a wait for another rank inside an operation."""
        begin = self._now()
        yield
        self._waits.append((op, begin, self._now()))

    def spans(self) -> list[Span]:
        """Return the operations since the last ``start``, with times in seconds of this machine's clock."""
        return self._in_seconds(self._spans)

    def waits(self) -> list[Span]:
        """Return the waits since the last ``start``, with times in seconds of this machine's clock."""
        return self._in_seconds(self._waits)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _in_seconds(self, taken: list[tuple[Op, Any, Any]]) -> list[Span]:
        seconds = self._clock()
        return [Span(op, seconds(begin), seconds(end)) for op, begin, end in taken]

    def _clock(self) -> Callable[[Any], float]:
        """Return a function that converts a recorded moment (a time or a CUDA event) to seconds of this machine's
        clock.

        On a GPU, this waits until the GPU has run all operations.
        """
        if not self._on_gpu:
            return float
        latest = self._now()
        latest.synchronize()
        now = time.perf_counter()
        return lambda event: now - event.elapsed_time(latest) / 1000  # elapsed_time returns milliseconds.
