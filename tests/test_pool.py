"""The pool of worker processes that other tests run on."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from pool import Pool, RemoteTraceback

from fourfold.errors import UserError


def add_ranks(rank: int, world_size: int, start: int) -> tuple[int, torch.Tensor]:
    total = torch.full((2,), float(rank + start))
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return dist.get_world_size(), total


def refuse_on_rank_1(rank: int, world_size: int) -> None:
    pair = dist.new_group([0, 1])
    if rank == 1:
        raise UserError("layer q does not fit")
    dist.all_reduce(torch.ones(2), group=pair)  # this waits for rank 1, which has raised an error


def raise_what_cannot_be_pickled(rank: int, world_size: int) -> None:
    class Local(Exception):
        pass

    raise Local("out of this world")


def fail_in_pytest(rank: int, world_size: int) -> None:
    with pytest.raises(UserError):
        pass


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def hang_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(2 * PATIENCE)


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 2])
def test_every_rank_runs_in_a_group_of_its_size(pool: Pool, world_size: int) -> None:
    results = pool.run(world_size, add_ranks, 3)
    expected = sum(range(world_size)) + 3 * world_size
    assert [size for size, _ in results] == [world_size] * world_size
    assert all(total.tolist() == [expected, expected] for _, total in results)


def test_first_failure_is_raised_with_its_rank_and_frees_the_peers(pool: Pool) -> None:
    before = pool.run(2, process_id)
    with pytest.raises(UserError, match="layer q does not fit") as failure:
        pool.run(2, refuse_on_rank_1)
    assert isinstance(failure.value.__cause__, RemoteTraceback)
    assert "on rank 1 of 2" in str(failure.value.__cause__)
    assert "refuse_on_rank_1" in str(failure.value.__cause__)
    assert pool.run(2, process_id) == before  # the same processes ran, so none was restarted


def test_failures_of_all_kinds_come_back(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="Local: out of this world"):
        pool.run(2, raise_what_cannot_be_pickled)
    with pytest.raises(RuntimeError, match="Failed: DID NOT RAISE"):
        pool.run(2, fail_in_pytest)


@pytest.mark.slow
def test_ranks_that_hang_or_die_are_replaced() -> None:
    # Use another pool, because the session's pool would have to start again.
    pool = Pool()
    try:
        pool.run(2, process_id)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 were not done with hang_on_rank_1"):
            pool.run(2, hang_on_rank_1, timeout=15.0)
        with pytest.raises(RuntimeError, match="rank 1 of 2 died: exit code 7"):
            pool.run(2, die_on_rank_1)
    finally:
        pool.close()
