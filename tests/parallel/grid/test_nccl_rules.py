"""Steps on a simulated GPU use only operations that NCCL has. Collectives that NCCL refuses fail on gloo too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from simulated_gpu import GPU, OnGpu, simulated_gpu
from tiny_runs import LLAMA, MIXTURE, tiny_run

import fourfold
from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.parallel.grid.communicate import check_for_nccl, send_rows
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

GRIDS = [{"dp": 2}, {"x": 2}, {"y": 2}, {"cp": 2}, {"pp": 2}, {"x": 2, "y": 2}, {"pp": 2, "cp": 2}]
GLOO_ONLY = {"monitored_barrier", "BAND", "BOR", "BXOR", "recvAnysource", "recv_anysource"}


def step_with_nccl(rank: int, world_size: int, run: RunConfig) -> tuple[float, int]:
    """Return the loss of a step, and its number of collectives."""
    with simulated_gpu() as gpu:
        job = Job(run, Grid(run.parallel, "cuda"), GPU)
        job.initialize(0)
        gpu.collectives.clear()
        result = job.train_step(random_micro_batches(run, 0, job.grid, GPU), 0)
        return result.loss.item(), gpu.collectives.total()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("model", [LLAMA, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_step_on_gpus_uses_only_what_nccl_has(pool: Pool, grid: dict[str, int], model: dict[str, object]) -> None:
    run = tiny_run(model, grid)
    (loss, collectives), *others = pool.run(run.parallel.world_size, step_with_nccl, run)
    assert collectives > 0 and all(other[0] == loss for other in others)
    assert loss == pytest.approx(5.6, abs=0.3)


def test_the_simulated_gpu_refuses_collectives_of_gloo(pool: Pool) -> None:
    pool.run(1, refused_collectives)


def refused_collectives(rank: int, world_size: int) -> None:
    with simulated_gpu():
        with pytest.raises(RuntimeError, match="CPU"):
            dist.all_reduce(torch.zeros(2))
        with pytest.raises(RuntimeError, match="contiguous"):
            dist.all_reduce(torch.zeros(2, 3, device=GPU).t())
        with pytest.raises(RuntimeError, match="int16"):
            dist.all_reduce(torch.zeros(2, device=GPU, dtype=torch.int16))
        dist.all_reduce(torch.zeros(2, device=GPU))


def test_communicate_asserts_the_rules_of_nccl_on_every_backend(pool: Pool) -> None:
    even, strided = torch.zeros(4, 2), torch.zeros(4, 2).t()
    check_for_nccl(even, torch.zeros(8, 2), (2, 1))
    for given, received in (
        (strided, None),
        (even.short(), None),
        (even, even.bfloat16()),
        (even, torch.zeros(3, 2)),
        (even, torch.zeros(4, 2, device="meta")),
    ):
        with pytest.raises(AssertionError):
            check_for_nccl(given, received)
    pool.run(2, wrong_numbers_of_rows)


def wrong_numbers_of_rows(rank: int, world_size: int) -> None:
    axis = Grid(ParallelConfig(x=2), "cpu").x
    with pytest.raises(AssertionError, match="4 rows are sent as"):
        send_rows(torch.zeros(4, 2), axis, [1, 2], [1, 2], "test")


def test_nothing_names_a_feature_that_only_gloo_has() -> None:
    found = {
        f"{path.name}:{node.lineno} {node.attr}"
        for path in Path(fourfold.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in GLOO_ONLY
    }
    assert not found


def test_axes_of_one_rank_and_of_the_same_ranks_have_no_communicator_of_their_own(pool: Pool) -> None:
    assert pool.run(1, groups_of, {}) == [{"world": 10}]
    counts = pool.run(4, groups_of, {"dp": 2, "x": 2})
    # Three groups are enough: one for dp, dp_cp, dp_z, and dp_cp_z, one for x and y_x, and one for axes with a single
    # rank.
    assert all(sorted(each.values()) == [2, 4, 4] and "world" not in each for each in counts)
    # Ring attention over cp has a group of its own.
    assert all(sorted(each.values()) == [1, 1, 2, 6] for each in pool.run(4, groups_of, {"cp": 2, "pp": 2}))


def groups_of(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, int]:
    """Return how many axes use each group."""
    counts: dict[str, int] = {}
    for axis in Grid(ParallelConfig(**sizes), "cpu").axes():
        name = "world" if axis.group is dist.group.WORLD else axis.group.group_name
        counts[name] = counts.get(name, 0) + 1
    return counts


def test_tensors_of_the_simulated_gpu_know_where_they_are() -> None:
    with simulated_gpu():
        tensor = torch.ones(2, device=GPU)
    assert isinstance(tensor, OnGpu) and tensor.is_cuda and tensor.device == GPU
