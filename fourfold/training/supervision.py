"""Supervise a training job: stop signals, the time limit, and the watchdog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.launch.stop_signals import StopRequest, stop_request
from fourfold.launch.watchdog import watchdog
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.training.run_folder import folder_of

HANGS = "hangs"
"""Subfolder of a run's folder that holds one folder per hang."""


@contextmanager
def supervised(place: Place, run: RunConfig) -> Iterator[StopRequest]:
    """Supervise this process while the block runs. Yields the request to stop, which the job must check."""
    limits = run.fault_tolerance
    launched, seconds = place.launcher != "local", 60 * limits.max_wall_time
    started = decided_by_rank_0(lambda: time.strftime("%Y-%m-%dT%H-%M-%S"))
    with (
        stop_request(announce=place.rank == 0, launched=launched, seconds=seconds) as stop,
        watchdog(folder_of(run) / HANGS / started, place, limits),
    ):
        yield stop
