"""If the host only issues a pipeline's operations, their times are measured on the device."""

from __future__ import annotations

import time

import pytest
import torch
from pool import Pool
from tiny_runs import GPT, tiny_run

from benchmarks.pipeline_times import Span
from benchmarks.stopwatch import Stopwatch
from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.pipeline.schedule import Op
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches


class Device:
    """A simulated GPU with one stream. ``finish`` runs all work that was issued, in order."""

    def __init__(self) -> None:
        self.now = 100.0
        self.work: list[float | Event] = []

    def finish(self) -> None:
        for work in self.work:
            if isinstance(work, Event):
                work.seconds = self.now
            else:
                self.now += work
        self.work.clear()


class Event:
    device: Device

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.seconds: float | None = None

    def record(self) -> None:
        self.device.work.append(self)

    def synchronize(self) -> None:
        self.device.finish()

    def elapsed_time(self, later: Event) -> float:
        assert self.seconds is not None and later.seconds is not None, "an event that is not done has no time"
        return 1000 * (later.seconds - self.seconds)


def test_times_on_a_gpu_are_measured_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(Event, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    # The host issues all operations at the same moment, so only the device's times differ.
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    stopwatch = Stopwatch(torch.device("cuda"))
    forward, backward, received = Op("F", 0, 0), Op("B", 0, 0), Op("RECV_B", 0, 0)
    with stopwatch.span(forward):
        device.work.append(2.0)
    with stopwatch.span(backward):
        with stopwatch.wait(received):
            device.work.append(0.5)
        device.work.append(4.0)
    assert device.now == 100.0, "nothing has waited"
    assert stopwatch.spans() == [Span(forward, 0.5, 2.5), Span(backward, 2.5, 7.0)]
    assert stopwatch.waits() == [Span(received, 2.5, 3.0)]
    stopwatch.start()
    assert stopwatch.spans() == stopwatch.waits() == []


def step_body(rank: int, world_size: int, run: RunConfig) -> tuple[list[Span], list[Span]]:
    """Return the times of the second of two steps."""
    device = torch.device("cpu")
    job = Job(run, Grid(run.parallel, "cpu"), device)
    job.initialize(0)
    assert job.pipeline is not None
    stopwatch = Stopwatch(device)
    stopwatch.attach(job.pipeline)
    for step in range(2):
        stopwatch.start()
        job.train_step(random_micro_batches(run, step, job.grid, device), step)
    return stopwatch.spans(), stopwatch.waits()


@pytest.mark.slow
def test_every_operation_of_a_step_has_its_time(pool: Pool) -> None:
    run = tiny_run(GPT | {"num_hidden_layers": 2}, {"pp": 2}, training={"micro_batch_size": 1, "global_batch_size": 3})
    first, last = pool.run(2, step_body, run)
    computed = [[span.op for span in spans if span.op.kind in ("F", "B")] for spans, _ in (first, last)]
    assert computed[0] == [Op(k, 0, i) for k, i in [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]]
    assert computed[1] == [Op(kind, 1, i) for i in range(3) for kind in ("F", "B")]
    for spans, waits in (first, last):
        times = [moment for span in spans for moment in (span.begin, span.end)]
        assert times == sorted(times)
        for wait in waits:
            assert any(span.begin <= wait.begin <= wait.end <= span.end for span in spans)
    assert [wait.op for wait in first[1]] == [Op("RECV_B", 0, i) for i in range(3)]
    assert [wait.op for wait in last[1]] == [Op("RECV_F", 1, i) for i in range(3)]
