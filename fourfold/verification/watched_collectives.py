"""Watch the collectives of a running process: when each was issued, when it finished, and how long the process
waited for it."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.profiler import record_function

from fourfold.parallel.grid.grid import Grid
from fourfold.torch_internals import END_OF_TRANSFERS, GROUP_METHODS
from fourfold.verification.collective_names import CollectiveNames
from fourfold.verification.exposure import Line


@dataclass
class TimedCollective:
    """A collective that has been issued. Times are in ns since the Unix epoch."""

    axis: str
    name: str
    start: int
    end: int | None = None
    """Time at which the collective ended. None while it is in flight."""

    def land(self) -> None:
        """Record the end of the collective unless it is already recorded."""
        if self.end is None:
            self.end = time.time_ns()


class WatchedCollectives:
    """Watches every collective while the context is open, including FSDP2's. In the profiler's trace, each collective
    gets a range with its name.

    On a GPU, this class does not record when a collective ends, because the profiler's trace shows it.
    """

    def __init__(self, grid: Grid, on_gpu: bool) -> None:
        self._names, self._on_gpu = CollectiveNames(grid), on_gpu
        self.sent: dict[Line, list[int]] = {}
        """For each axis, operation, and purpose: the number of collectives, and the bytes of their full tensors."""
        self.dtypes: defaultdict[str, set[torch.dtype]] = defaultdict(set)
        """For each purpose, the dtypes of the tensors that were sent."""
        self.flights: list[TimedCollective] = []
        self.held: list[tuple[str, int, int]] = []
        """Time spans that the step's thread spent issuing a collective or waiting for it. Each has the axis, the start,
        and the end (ns since the Unix epoch)."""
        self._step_thread = get_ident()
        self._flight_of: WeakKeyDictionary[dist.Work, TimedCollective] = WeakKeyDictionary()
        self._replaced: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Self:
        for method, operation in GROUP_METHODS.items():
            if hasattr(dist.ProcessGroup, method):
                self._replace(dist.ProcessGroup, method, partial(self._issuing, operation))
        self._replace(dist.ProcessGroup, END_OF_TRANSFERS, self._ending)
        self._replace(dist.Work, "wait", self._waiting)
        return self

    def __exit__(self, *exception: object) -> None:
        for owner, method, original in self._replaced:
            setattr(owner, method, original)

    def _replace(self, owner: type, method: str, watched: Callable[[Any], Any]) -> None:
        self._replaced.append((owner, method, vars(owner)[method]))
        setattr(owner, method, watched(getattr(owner, method)))

    def _issuing(self, operation: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if group.size() == 1:
                return run(group, *args, **kwargs)
            line = self._names.line(operation, group)
            flight = TimedCollective(line[0], "{} {}: {}".format(*line), time.time_ns())
            self.flights.append(flight)
            with record_function(flight.name):
                work = run(group, *args, **kwargs)
            self._hold(flight.axis, flight.start)
            if operation != "recv":
                whole = args[1] if operation == "reduce_scatter" else args[0]
                whole = whole[0] if isinstance(whole, list) else whole
                entry = self.sent.setdefault(line, [0, 0])
                entry[0] += 1
                entry[1] += whole.nbytes
                self.dtypes[line[2]].add(whole.dtype)
            if work is not None:
                self._flight_of[work] = flight
                # gloo does not report when a send or a receive ends.
                if not self._on_gpu and operation not in ("send", "recv"):
                    work.get_future().then(lambda _: flight.land())
            return work

        return issue

    def _ending(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """In the trace, put a range around the end of a group of sends and receives. NCCL launches the whole group at
        this point."""

        def end(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            with record_function(self.flights[-1].name):
                return run(group, *args, **kwargs)

        return end

    def _waiting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            flight = self._flight_of.get(work)
            if flight is None:
                return run(work, *args, **kwargs)
            start = time.time_ns()
            with record_function(f"wait for {flight.name}"):
                result = run(work, *args, **kwargs)
            flight.land()
            self._hold(flight.axis, start)
            return result

        return wait

    def _hold(self, axis: str, start: int) -> None:
        """Record that the step's thread has been busy with a collective since ``start``. Do nothing on any other
        thread, such as the threads of ``parallel.data.fsdp_on_gloo``."""
        if get_ident() == self._step_thread:
            self.held.append((axis, start, time.time_ns()))
