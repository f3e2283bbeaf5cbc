"""Read computation and collectives from a trace that torch's profiler wrote. Times are in µs."""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.data.atomic_files import write_output
from fourfold.verification.step_times import Span

OPERATOR = re.compile(r"(?!c10d::|autograd::|torch::)[a-z]\w*::|## Call CompiledFxGraph")
"""Matches the event names that count as CPU computation: operators such as ``aten::mm``, and graphs that torch.compile
built."""

PROCESS_OF_FLIGHTS = 1 << 30
"""Process id of the tracks that show collectives in the written trace. No real process has this id."""


class NamedSpan(NamedTuple):
    """The grid axis, the name, and the time span (in µs) of one collective."""

    axis: str
    name: str
    span: Span


class ChromeTrace:
    """The events in a trace file of torch's profiler (Trace Event Format, JSON)."""

    def __init__(self, path: Path) -> None:
        self._record: dict[str, Any] = json.loads(path.read_bytes(), strict=False)
        self._events: list[dict[str, Any]] = self._record["traceEvents"]

    def span(self, start: int, end: int) -> Span:
        """Convert a start and an end, as given by ``time.time_ns``, to the time scale of the trace (µs)."""
        origin = int(self._record["baseTimeNanoseconds"])
        return (start - origin) / 1000, (end - origin) / 1000

    def operators(self, mark: str) -> list[Span]:
        """Return the time spans of computation on the CPU in the step's thread. This thread has a profiler range with
        the name ``mark``."""
        thread = next(event["tid"] for event in self._events if event["name"] == mark)
        events = (event for event in self._events if event.get("cat") == "cpu_op" and event["tid"] == thread)
        return [_span(event) for event in events if OPERATOR.match(event["name"])]

    def kernels(self) -> list[Span]:
        """Return the time spans of all GPU kernels except NCCL's kernels."""
        return [_span(event) for event in self._of_category("kernel") if not _is_nccl(event)]

    def nccl_kernels(self, axis_of: Mapping[str, str]) -> list[NamedSpan]:
        """Return the axis, the name, and the time span of each NCCL kernel. The axis is "other" if the kernel was
        launched outside the ranges in ``axis_of``.

        Args:
            axis_of: Maps the names of profiler ranges to axes. Each range surrounds the call that issues a collective.
        """
        ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in self._of_category("user_annotation"):
            if event["name"] in axis_of:
                ranges[event["tid"]].append((*_span(event), event["name"]))
        for each in ranges.values():
            each.sort()
        launches = {
            event["args"]["correlation"]: event
            for event in self._of_category("cuda_runtime", "cuda_driver")
            if "correlation" in event.get("args", {})
        }
        found = []
        for kernel in filter(_is_nccl, self._of_category("kernel")):
            launch = launches.get(kernel["args"].get("correlation"))
            name = None if launch is None else _around(ranges[launch["tid"]], launch["ts"])
            found.append(NamedSpan("other" if name is None else axis_of[name], name or kernel["name"], _span(kernel)))
        return found

    def write(self, path: Path, flights: Iterable[NamedSpan]) -> None:
        """Write the trace to a compressed file. Additional tracks show the collectives ``flights``, by axis."""
        # Viewers need several tracks for overlapping events, so assign each event to a free track of its axis.
        lanes: dict[tuple[str, int], float] = {}
        events: list[dict[str, Any]] = []
        for axis, name, (start, end) in sorted(flights, key=lambda flight: flight.span):
            lane = next((axis, number) for number in count(1) if lanes.get((axis, number), start) <= start)
            lanes[lane] = end
            place = {"pid": PROCESS_OF_FLIGHTS, "tid": [*lanes].index(lane)}
            events.append({"ph": "X", "cat": "flight", "name": name, "ts": start, "dur": end - start, **place})
        names = [("process_name", 0, "collectives under way")]
        names += [("thread_name", tid, f"{axis} {number}") for tid, (axis, number) in enumerate(lanes)]
        named = [
            {"ph": "M", "name": kind, "pid": PROCESS_OF_FLIGHTS, "tid": tid, "args": {"name": name}}
            for kind, tid, name in names
        ]
        text = json.dumps({**self._record, "traceEvents": self._events + named + events})
        write_output(path, gzip.compress(text.encode(), compresslevel=5))

    def _of_category(self, *categories: str) -> Iterable[dict[str, Any]]:
        return (event for event in self._events if event.get("cat") in categories)


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _is_nccl(kernel: Mapping[str, Any]) -> bool:
    return str(kernel["name"]).startswith("nccl")


def _around(ranges: list[tuple[float, float, str]], moment: float) -> str | None:
    """Return the name of the range that began most recently before ``moment``, or None if this range had already
    ended."""
    place = bisect_right(ranges, moment, key=lambda each: each[0]) - 1
    return ranges[place][2] if place >= 0 and moment <= ranges[place][1] else None
