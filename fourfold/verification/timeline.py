"""Trace a few steps of each process for ``fourfold train --profile``, and split the time of a step by axis."""

import json
import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import temporary_name, write_output, writing
from fourfold.data.tokenizer import Tokenizer
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.training.job import Job
from fourfold.training.run_folder import PROFILE_FILE
from fourfold.verification.chrome_trace import ChromeTrace, NamedSpan
from fourfold.verification.step_times import StepTimes
from fourfold.verification.watched_collectives import WatchedCollectives

WARM_UP = 2
"""Number of steps before the first recorded step. These steps compile code and connect NCCL."""

STEPS = 3
"""Number of recorded steps."""


class Timeline:
    """A training callback that records steps 3 to 5 after the start (or resumption) of training and writes their
    traces."""

    def __init__(self, run: RunConfig, job: Job, tokenizer: Tokenizer | None, run_dir: Path) -> None:
        self.job, self.file = job, run_dir / PROFILE_FILE
        self.on_gpu = job.device.type == "cuda"
        self._taken = 0
        self._recording, self._step = ExitStack(), ExitStack()
        if dist.get_rank() == 0:
            # An earlier start may have had more processes, and this start would not overwrite all of their files.
            shutil.rmtree(self.file.parent, ignore_errors=True)

    def after_step(self, steps: int) -> None:
        """Start, continue, or stop recording. After the last recorded step, write the trace. Every process must call
        this.

        Raises:
            UserError: A process cannot write its trace, or rank 0 cannot write the record.
        """
        self._taken += 1
        if self._taken == WARM_UP:
            self._start()
        elif self._taken == WARM_UP + STEPS:
            self._end(steps)
            return
        if WARM_UP <= self._taken < WARM_UP + STEPS:
            self._begin(steps)

    def close(self) -> None:
        """Restore torch's functions, even if the run ends during recording."""
        self._recording.close()

    def _start(self) -> None:
        on_device = [ProfilerActivity.CUDA] if self.on_gpu else []
        self._profile = self._recording.enter_context(profile(activities=[ProfilerActivity.CPU, *on_device]))
        # Starting the profiler takes longer on some processes, so wait for all of them.
        dist.barrier()
        self._collectives = self._recording.enter_context(WatchedCollectives(self.job.grid, self.on_gpu))
        self._started = self._now()

    def _begin(self, steps: int) -> None:
        self._step.close()
        self._step = self._recording.enter_context(ExitStack())
        self._step.enter_context(record_function(_mark(steps + 1)))

    def _end(self, steps: int) -> None:
        ended = self._now()
        self.close()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with failing_together():
            mine = self._write(self.file.with_name(f"rank{rank}.json.gz"), ended, steps)
        everyone: list[dict[str, Any]] | None = [{}] * world_size if rank == 0 else None
        dist.gather_object(mine, everyone)
        with failing_together():
            if everyone is not None:
                record = {"steps": [*range(steps - STEPS + 1, steps + 1)], "ranks": everyone}
                write_output(self.file, json.dumps(record, indent=1))

    def _now(self) -> int:
        if self.on_gpu:
            torch.cuda.synchronize(self.job.device)
        return time.time_ns()

    def _write(self, path: Path, ended: int, steps: int) -> dict[str, Any]:
        """Write the trace of this process. Return the mean times and the mean traffic of one recorded step."""
        temporary = temporary_name(path)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            try:
                self._profile.export_chrome_trace(str(temporary))
                trace = ChromeTrace(temporary)
            finally:
                temporary.unlink(missing_ok=True)
        watched = self._collectives
        if self.on_gpu:
            flights = trace.nccl_kernels({flight.name: flight.axis for flight in watched.flights})
            compute, held = trace.kernels(), None
        else:
            flights = [NamedSpan(f.axis, f.name, trace.span(f.start, f.end or ended)) for f in watched.flights]
            compute = trace.operators(_mark(steps))
            held = [(axis, trace.span(start, end)) for axis, start, end in watched.held]
        trace.write(path, flights)
        under_way = [(flight.axis, flight.span) for flight in flights]
        times = StepTimes.of(trace.span(self._started, ended), STEPS, compute, under_way, held)
        lines = [
            {"axis": axis, "op": operation, "purpose": why, "count": count / STEPS, "bytes": size / STEPS}
            for (axis, operation, why), (count, size) in watched.sent.items()
        ]
        return {"rank": dist.get_rank(), **asdict(times), "collectives": lines}


def _mark(step: int) -> str:
    """Return the name of the profiler range that surrounds a step in the trace."""
    return f"step {step}"
