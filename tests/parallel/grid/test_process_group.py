"""A grid in a user's own program starts a process group, or fails with an error message."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from pool import Pool
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # these names are public

import fourfold
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.parallel.grid.attempt_store import attempt_store
from fourfold.parallel.grid.process_group import end_process_group, start_process_group


def test_a_grid_of_several_processes_needs_a_launcher() -> None:
    with pytest.raises(UserError, match=r"this grid needs 4 processes, but no launcher started them.*nproc-per-node 4"):
        fourfold.Grid(fourfold.ParallelConfig(x=2, y=2), "cpu")
    assert not dist.is_initialized()


def test_a_grid_of_one_process_needs_none() -> None:
    try:
        grid = fourfold.Grid(fourfold.ParallelConfig(), "cpu")
        assert dist.get_backend() == "gloo"
        assert {axis.size for axis in grid.axes()} == {1}
    finally:
        dist.destroy_process_group()


def meet(server: Store, world_size: int, seconds: float = PATIENCE) -> list[Store]:
    """Return the part of a server's store that each rank of one attempt gets. All ranks ask at once."""
    with ThreadPoolExecutor(world_size) as threads:
        ranks = [
            threads.submit(attempt_store, server, rank, world_size, timedelta(seconds=seconds))
            for rank in range(world_size)
        ]
        return [rank.result() for rank in ranks]


def test_the_ranks_of_an_attempt_share_a_store_that_no_attempt_before_has_used() -> None:
    server = HashStore()
    for attempt in range(3):
        server.set("/ask/2", "a word of a rank that died before it was answered")
        stores = meet(server, 3)
        stores[2].set("key", str(attempt))
        assert [store.get("key") for store in stores] == [str(attempt).encode()] * 3
        assert not stores[0].check(["of this attempt"])
        stores[0].set("of this attempt", "")


def test_a_rank_that_does_not_come_is_named() -> None:
    server = HashStore()
    server.set("/ask/1", "a word of an earlier attempt")
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1\] did not arrive"):
        attempt_store(server, 0, 2, timedelta(seconds=0.1))


def meet_in_rounds(rank: int, world_size: int, port: int) -> list[float]:
    """Start the default group again and again, as a job does after failures on another node."""
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sums = []
    for restarts in range(2):
        # The node of rank 1 was replaced, so its agent counts from 0 again.
        count = restarts if rank == 0 else 0
        place = Place(rank, rank, world_size, world_size, "torchrun", count)
        start_process_group(place, f"tcp://127.0.0.1:{port}", torch.device("cpu"), timedelta(seconds=PATIENCE))
        one = torch.ones(1)
        dist.all_reduce(one)
        sums.append(one.item())
        end_process_group(failed=False)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return sums


def test_ranks_meet_whatever_their_agents_count(pool: Pool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(2, meet_in_rounds, server.port) == [[2.0, 2.0]] * 2
