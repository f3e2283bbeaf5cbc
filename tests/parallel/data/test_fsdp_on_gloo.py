"""FSDP2's collectives on gloo run in the background, and nothing reads their results too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from fourfold.config.run import ParallelConfig
from fourfold.parallel.data import fsdp_on_gloo
from fourfold.parallel.data.fsdp_on_gloo import (
    IN_FLIGHT,
    GatherInBackground,
    ReplicasInBackground,
    SumInBackground,
    replicas_in_background,
)
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.torch_internals import MeshWithGroups
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches


class Slow:
    """An exchange of two equal parts. The data arrives only when somebody waits for it."""

    def __init__(self, received: Tensor, sent: Tensor) -> None:
        self.received, self.sent = received, sent

    def wait(self) -> None:
        self.received.copy_(self.sent)


class Two:
    """A group of two processes."""

    def size(self) -> int:
        return 2


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Slow]:
    """Record the exchanges that are started, instead of running them on gloo. Return the list of records."""
    started: list[Slow] = []

    def start(received: Tensor, sent: Tensor, group: Any, async_op: bool) -> Slow:
        assert async_op
        started.append(Slow(received, sent))
        return started[-1]

    monkeypatch.setattr(dist, "all_to_all_single", start)
    return started


def summed(sums: SumInBackground, value: float) -> Tensor:
    out = torch.zeros(3)
    sums(out, torch.full((6,), value), Two(), dist.ReduceOp.SUM)  # type: ignore[arg-type]
    return out


def test_sums_come_later_and_few_are_in_flight(exchanges: list[Slow]) -> None:
    sums = SumInBackground()
    outs = [summed(sums, float(i)) for i in range(1, IN_FLIGHT + 2)]
    assert [out.tolist() for out in outs] == [[2.0] * 3] + [[0.0] * 3] * IN_FLIGHT
    sums.finish()
    assert [out[0].item() for out in outs] == [2.0 * i for i in range(1, IN_FLIGHT + 2)]


def test_a_sum_that_is_read_is_there(exchanges: list[Slow]) -> None:
    sums = SumInBackground()
    earlier = summed(sums, 1.0)
    sums.at_once = True
    assert summed(sums, 2.0).tolist() == [4.0] * 3 and earlier.tolist() == [2.0] * 3


@pytest.mark.parametrize("at_once", [False, True])
def test_sums_over_replicas_follow_those_over_shards(
    exchanges: list[Slow], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    def all_reduce(sum: Tensor, group: Any, async_op: bool) -> Slow:
        assert async_op and group == "replicas"
        return Slow(sum, 10 * sum)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    sums = SumInBackground()
    sums.at_once = at_once
    outs = []
    for i in range(1, IN_FLIGHT + 2):
        outs.append(summed(sums, float(i)))
        sums.all_reduce(outs[-1], "replicas")  # type: ignore[arg-type]
    of_one_shard = torch.ones(3)
    sums.all_reduce(of_one_shard, "replicas")  # type: ignore[arg-type]
    if not at_once:
        assert [out[0].item() for out in outs] == [2.0, 0.0, 0.0]
        sums.finish()
    assert [out[0].item() for out in [*outs, of_one_shard]] == [20.0, 40.0, 60.0, 10.0]


def groups_of_a_mesh(rank: int, world_size: int) -> None:
    """Check that a mesh keeps its levels when its replicas are summed in the background."""
    grid = Grid(ParallelConfig(z=world_size), "cpu")
    levels = object()
    mesh = replicas_in_background(MeshWithGroups(grid.hybrid_mesh, {1: levels}), SumInBackground())
    assert mesh.get_group(1) is levels
    replicas = mesh.get_group(0)
    assert isinstance(replicas, ReplicasInBackground) and dist.get_backend(replicas) == "gloo"


def test_a_mesh_has_levels_and_replicas_in_the_background(pool: Pool) -> None:
    pool.run(2, groups_of_a_mesh)


def test_a_gather_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(out: Tensor, part: Tensor, group: Any, async_op: bool) -> str:
        assert async_op
        return "work"

    monkeypatch.setattr(fsdp_on_gloo, "all_gather_single", start)
    assert GatherInBackground()(torch.zeros(4), torch.zeros(2), Two()) == "work"  # type: ignore[arg-type,comparison-overlap]


def sums_at_once(rank: int, world_size: int, changes: dict[str, Any]) -> list[bool]:
    """For each micro-batch of a step, return whether the process waits for gradient sums as soon as FSDP2 needs
    them."""
    run = make_run(
        {
            "model": {"preset": "llama-tiny", "vocab_size": 128},
            "data": {"source": "python-stdlib"},
            "training": {"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "train_steps": 1}
            | changes.get("training", {}),
            "parallel": changes["parallel"],
        }
    )
    grid = Grid(run.parallel, "cpu")
    job = Job(run, grid, torch.device("cpu"))
    job.initialize(0)
    seen: list[bool] = []
    start = dist.all_to_all_single
    sums = job.stages[0].sums  # type: ignore[attr-defined]

    def watched(*tensors: Tensor, **options: Any) -> Any:
        seen.append(sums.at_once or sums.at_once_over_shards)
        return start(*tensors, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", watched)
        job.train_step(random_micro_batches(run, 0, grid, torch.device("cpu")), 0)
    return seen


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        pytest.param({"parallel": {"z": 2}}, False, True, id="micro-batches"),
        pytest.param({"parallel": {"z": 2, "zero": 1}}, False, False, id="summed once"),
        pytest.param({"parallel": {"z": 2, "zero": 2}}, False, True, id="summed every time"),
        pytest.param({"parallel": {"z": 2}, "training": {"global_batch_size": 2}}, False, False, id="one micro-batch"),
        pytest.param(
            {"parallel": {"z": 2}, "training": {"precision": "bf16", "master_weights": "bf16", "reduce_dtype": "fp32"}},
            False,
            True,
            id="sums in float32 of bf16 weights",
        ),
    ],
)
def test_sums_are_waited_for_if_fsdp2_reads_them(pool: Pool, changes: dict[str, Any], first: bool, last: bool) -> None:
    for seen in pool.run(2, sums_at_once, changes):
        assert seen
        assert (seen[0], seen[-1]) == (first, last)
