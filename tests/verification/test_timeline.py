"""``fourfold train --profile``: what the traces and the table of times say."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import Cli
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from pool import Pool
from tiny_corpus import run_file
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.training.run_folder import PROFILE_FILE
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.chrome_trace import ChromeTrace
from fourfold.verification.step_times import AxisTimes, Span, SpanOfAxis, StepTimes
from fourfold.verification.timeline import Timeline
from fourfold.verification.trace import trace

Line = tuple[str, str, str]
LATE = 0.2
"""One rank begins each step this many seconds late."""


def methods_of_torch() -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))


def profiled_body(rank: int, world_size: int, run: RunConfig, folder: Path, late: int | None = None) -> float:
    """Take six steps as the training loop does. Return the seconds of one recorded step."""
    grid, device = Grid(run.parallel, "cpu"), torch.device("cpu")
    job = Job(run, grid, device)
    job.initialize(0)
    before = methods_of_torch()
    timeline, ends = Timeline(run, job, None, folder), []
    processes = [0] * world_size
    dist.all_gather_object(processes, os.getpid())
    for step in range(6):
        if rank == late:
            wait_until(lambda: sleeps(processes[0]))  # wait until rank 0 waits in the step's first collective
            time.sleep(LATE)
        job.train_step(random_micro_batches(run, step, grid, device), step)
        ends.append(time.perf_counter())
        timeline.after_step(step + 1)
        # torch's functions are replaced only while steps are recorded
        assert (methods_of_torch() == before) == (step not in (1, 2, 3))
    timeline.close()
    return (ends[4] - ends[1]) / 3


def sleeps(process_id: int) -> bool:
    """Return whether a process waits for another process. A busy machine can also keep a process from running, but such
    a process is ready to run and does not count."""
    for _ in range(10):
        if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            return False
        time.sleep(0.01)
    return True


def profiled(pool: Pool, run: RunConfig, folder: Path, late: int | None = None) -> tuple[dict[str, Any], list[float]]:
    seconds = pool.run(run.parallel.world_size, profiled_body, run, folder, late)
    return json.loads((folder / PROFILE_FILE).read_text()), seconds


COMPILED = {"training": {"compile": True}, "activation_checkpoint": {"mode": "full"}}
IN_PARTS = {"training": {"micro_batch_size": 4}, "overlap": {"batch_parts": 2}}
CASES = [
    pytest.param(LLAMA, {"x": 2, "z": 2}, {}, marks=pytest.mark.slow),
    (GPT, {"pp": 2, "dp": 2}, {}),
    pytest.param(LLAMA, {"cp": 2, "y": 2}, {}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"cp": 2, "cp_method": "ring"}, {}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"z": 2, "dp": 2}, {}, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"dp": 2, "z": 2, "zero": 3}, COMPILED, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"x": 2}, COMPILED, marks=pytest.mark.slow),
    pytest.param(GPT, {"x": 2, "y": 2}, IN_PARTS, marks=pytest.mark.slow),
    pytest.param(LLAMA, {"z": 4}, {"overlap": {"shards_per_node": 2}}, marks=pytest.mark.slow),
    pytest.param(GPT, {"z": 2, "dp": 2, "zero": 2}, {"overlap": {"shards_per_node": 2}}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "grid", "sections"), CASES, ids=str)
def test_a_step_sends_what_the_trace_says_and_its_parts_add_up(
    pool: Pool, tmp_path: Path, model: dict[str, Any], grid: dict[str, Any], sections: dict[str, Any]
) -> None:
    sections = sections | {"training": {"device": "cpu", **sections.get("training", {})}}
    run = tiny_run(model, grid, **sections)
    record, seconds = profiled(pool, run, tmp_path)
    traced = trace(run, whole=True)
    stages = [stage.collectives for stage in traced.pipeline] or [traced.collectives]
    world_size = run.parallel.world_size
    assert record["steps"] == [3, 4, 5]
    assert [rank["rank"] for rank in record["ranks"]] == [*range(world_size)]
    for rank, measured in zip(record["ranks"], seconds, strict=True):
        sent = {(c["axis"], c["op"], c["purpose"]): (c["count"], c["bytes"]) for c in rank["collectives"]}
        stage = stages[rank["rank"] * len(stages) // world_size]
        assert sent == {(c.axis, c.op, c.purpose): (c.count, c.bytes) for c in stage}
        assert set(rank["axes"]) == {axis for axis, _, _ in sent}
        assert rank["compute"] + rank["exposed"] + rank["idle"] == pytest.approx(rank["seconds"])
        assert rank["seconds"] <= measured * 1.001  # ``measured`` also includes the profiler's start
        assert min(rank["compute"], rank["exposed"], rank["idle"]) > 0
        assert sum(times["exposed"] for times in rank["axes"].values()) == pytest.approx(rank["exposed"])
        for times in rank["axes"].values():
            assert 0 <= times["hidden"] <= times["issued"] <= rank["seconds"]


@pytest.mark.slow
def test_a_process_waits_for_one_that_is_late(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(LLAMA, {"x": 2}, training={"device": "cpu"})
    record, _ = profiled(pool, run, tmp_path, late=1)
    waits, comes_late = record["ranks"]
    assert waits["axes"]["x"]["exposed"] >= LATE
    assert waits["axes"]["x"]["issued"] >= LATE
    assert comes_late["idle"] >= LATE
    assert comes_late["exposed"] < waits["exposed"]


def stopped_body(rank: int, world_size: int, run: RunConfig, folder: Path) -> None:
    before = methods_of_torch()
    timeline = Timeline(run, Job(run, Grid(run.parallel, "cpu"), torch.device("cpu")), None, folder)
    for steps in (1, 2, 3):
        timeline.after_step(steps)
    assert methods_of_torch() != before
    timeline.close()
    assert methods_of_torch() == before
    with torch.profiler.profile():  # torch allows only one profiler at a time
        pass


def test_a_run_that_ends_while_it_is_recorded_leaves_torch_as_it_was(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, stopped_body, tiny_run(LLAMA, {}, training={"device": "cpu"}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_trace_shows_steps_and_the_collectives_in_flight(pool: Pool, tmp_path: Path) -> None:
    run = tiny_run(GPT, {"x": 2}, training={"device": "cpu"}, overlap={"batch_parts": 2})
    record, _ = profiled(pool, run, tmp_path)
    folder = (tmp_path / PROFILE_FILE).parent
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json.gz", "rank1.json.gz", "times.json"]
    events = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"]: event for event in events if event["name"].startswith("step ")}
    assert sorted(steps) == ["step 3", "step 4", "step 5"]
    flights = [event for event in events if event.get("cat") == "flight"]
    assert len(flights) == 3 * sum(line["count"] for line in record["ranks"][0]["collectives"])
    ends: dict[int, float] = {}
    for flight in sorted(flights, key=lambda each: float(each["ts"])):
        assert ends.get(flight["tid"], 0.0) <= flight["ts"]  # otherwise no viewer could draw the events
        ends[flight["tid"]] = flight["ts"] + flight["dur"]
    # One part's collective is in flight while another part computes.
    assert len(ends) > 1
    # A collective is in flight from its call, which the profiler also records, until the wait for it ends.
    (first,) = [event for event in flights if event["ts"] == min(each["ts"] for each in flights)]
    of_name = [event for event in events if event["name"].endswith(first["name"]) and event is not first]
    issued, waited = sorted((e for e in of_name if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])[:2]
    assert waited["name"] == f"wait for {first['name']}"
    assert first["ts"] <= issued["ts"] < first["ts"] + first["dur"] <= waited["ts"] + waited["dur"] + 1000


spans = st.tuples(st.integers(-5, 40), st.integers(0, 12)).map(lambda span: (span[0], span[0] + span[1]))
of_axes = st.lists(st.tuples(st.sampled_from("xz"), spans), max_size=6)


def moments(some: list[Span]) -> set[float]:
    """Return all microseconds from 0 to 29 that begin inside one of these spans."""
    return {moment for start, end in some for moment in range(int(start), int(end)) if 0 <= moment < 30}


def of_axis(some: list[SpanOfAxis], axis: str) -> set[float]:
    return moments([span for each, span in some if each == axis])


@given(compute=st.lists(spans, max_size=6), flights=of_axes, held=st.none() | of_axes)
def test_times_equal_a_count_of_every_microsecond(
    compute: list[Span], flights: list[SpanOfAxis], held: list[SpanOfAxis] | None
) -> None:
    times = StepTimes.of((0, 30), 2, compute, flights, held)
    busy = moments(compute)

    def seconds(some: set[float]) -> Any:
        return pytest.approx(len(some) / 2e6)

    exposed = {axis: of_axis(flights, axis) - busy if held is None else of_axis(held, axis) for axis in "xz"}
    any_exposed = exposed["x"] | exposed["z"]
    assert times.seconds == pytest.approx(15e-6)
    assert times.compute == seconds(busy - any_exposed)
    assert times.exposed == seconds(any_exposed)
    assert times.idle == seconds(set(range(30)) - busy - any_exposed)
    for axis, found in times.axes.items():
        issued = of_axis(flights, axis)
        hidden = issued & (busy - any_exposed)
        assert found == AxisTimes(seconds(issued), seconds(hidden), seconds(exposed[axis]))
    assert set(times.axes) == {axis for axis, _ in flights}


def test_kernels_of_nccl_belong_to_the_range_that_launched_them(tmp_path: Path) -> None:
    """The test writes a trace as torch does on a GPU, with kernels, their launches, and ranges of the CPU."""

    def event(category: str, name: str, thread: int, start: int, end: int, launch: int | None = None) -> dict[str, Any]:
        arguments = {} if launch is None else {"correlation": launch}
        place = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
        return {**place, "ts": start, "dur": end - start, "args": arguments}

    gather, total = "x all_gather: up: tokens", "z all_reduce: gradients"
    events = [
        event("user_annotation", gather, 1, 0, 4),
        event("cuda_runtime", "cudaLaunchKernelExC", 1, 1, 2, 11),
        event("user_annotation", total, 2, 0, 4),
        event("cuda_driver", "cuLaunchKernelEx", 2, 3, 4, 12),
        event("cuda_runtime", "cudaLaunchKernel", 1, 5, 6, 13),
        event("cuda_runtime", "cudaLaunchKernelExC", 1, 6, 7, 14),
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 20, 10, 20, 11),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 21, 15, 40, 12),
        event("kernel", "gemm", 7, 18, 30, 13),
        event("kernel", "ncclDevKernel_Broadcast_RING_LL", 22, 50, 52, 14),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 1000, "traceEvents": events}))
    read = ChromeTrace(path)
    assert read.span(1000, 61_000) == (0, 60)
    assert read.kernels() == [(18, 30)]
    kernels = read.nccl_kernels({gather: "x", total: "z"})
    assert [(each.axis, each.span) for each in kernels] == [("x", (10, 20)), ("z", (15, 40)), ("other", (50, 52))]
    times = StepTimes.of((0, 60), 1, read.kernels(), [(each.axis, each.span) for each in kernels], None)
    assert times.axes["x"] == AxisTimes(*(pytest.approx(us / 1e6) for us in (10, 2, 8)))
    assert times.axes["z"] == AxisTimes(*(pytest.approx(us / 1e6) for us in (25, 12, 13)))
    assert (times.compute, times.exposed, times.idle) == tuple(pytest.approx(us / 1e6) for us in (12, 20, 28))


def test_a_run_prints_where_its_time_goes(cli: Cli, prefix: str, tmp_path: Path) -> None:
    path = run_file(tmp_path, prefix, training__device="cpu", training__train_steps=5)
    code, out, _ = cli("train", path, "--profile", "--set", "parallel.z=2")
    assert code == 0
    record = json.loads((tmp_path / "runs" / "run" / PROFILE_FILE).read_text())
    sent = sum(line["count"] for line in record["ranks"][0]["collectives"])
    assert re.search(rf"│ z +│ +{sent:.0f} │", out)
    assert re.search(r"│ mean +│ +\d", out)
    code, out, _ = cli("train", path, "--profile", "--set", "training.train_steps=7", "--set", "parallel.z=2")
    assert code == 0
    assert "No profile: the run ended before the fifth step after its start." in out
    assert not (tmp_path / "runs" / "run" / PROFILE_FILE).exists()
