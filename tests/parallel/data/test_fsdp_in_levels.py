"""Collectives in two levels give the same results as collectives in one level, for groups of every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from tiny_runs import LLAMA, tiny_run
from torch import Tensor

from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.data.fsdp_in_levels import GatherInLevels, SumInLevels, SumOfOneShard
from fourfold.parallel.data.fsdp_on_gloo import GatherInBackground, SumInBackground
from fourfold.parallel.grid.communicate import by_all_to_all
from fourfold.parallel.grid.grid import Grid, TwoLevels

LENGTH = 3


def moved(rank: int, world_size: int, sizes: dict[str, int], name: str, per_node: int) -> list[bool]:
    """Return whether gathers and sums are right, first as on a GPU and then as on a CPU."""
    grid = Grid(ParallelConfig(**sizes), "cpu")
    group, whole = grid.shards(name, per_node), grid.axis(name)
    assert isinstance(group, TwoLevels) and group is grid.shards(name, per_node)
    assert (group.size(), group.inside.size) == (whole.size, per_node)
    members = dist.get_process_group_ranks(whole.group)
    numbers: list[Any] = [None] * whole.size
    dist.all_gather_object(numbers, group.rank(), whole.group)
    assert sorted(numbers) == list(range(whole.size))
    # Rank c fills its shard with its own number, so the gathered tensor shows which rank each shard comes from.
    expected = torch.zeros(whole.size, LENGTH)
    for number, member in zip(numbers, members, strict=True):
        expected[number] = member
    found = []
    for gather, sums in ((GatherInLevels(), SumInLevels()), (GatherInBackground(), SumInBackground())):
        gathered = torch.full((whole.size, LENGTH), -1.0)
        mine = gathered[group.rank()].fill_(rank)
        work = gather(gathered.view(-1), mine, group)
        if work is not None:
            work.wait()
        parts = torch.arange(whole.size * LENGTH) + 1000.0 * rank
        out = torch.empty(LENGTH)
        sums(out, parts, group, dist.ReduceOp.SUM)
        if isinstance(sums, SumInBackground):
            sums.finish()
        total = whole.size * torch.arange(whole.size * LENGTH).view(-1, LENGTH) + 1000.0 * sum(members)
        found.append(torch.equal(gathered, expected) and torch.equal(out, total[group.rank()]))
    assert by_all_to_all(group.inside.group) and group.inside.group is not group.inside_for_sums.group
    return found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("sizes", "name", "per_node"),
    [
        ({"z": 4}, "z", 2),
        ({"dp": 2, "cp": 2, "z": 2}, "dp_cp_z", 4),
        ({"z": 6}, "z", 3),
        ({"x": 2, "z": 4}, "z", 2),
        ({"z": 6}, "z", 2),
        ({"pp": 2, "dp": 4}, "dp_cp_z", 2),
        ({"dp": 2, "z": 2, "y": 2}, "dp_cp_z", 2),
    ],
    ids=str,
)
def test_two_levels_move_what_one_moves(pool: Pool, sizes: dict[str, int], name: str, per_node: int) -> None:
    world_size = ParallelConfig(**sizes).world_size
    assert pool.run(world_size, moved, sizes, name, per_node) == [[True, True]] * world_size


def nodes_of(rank: int, world_size: int) -> list[list[int]]:
    grid = Grid(ParallelConfig(x=2, z=4), "cpu")
    levels = grid.shards("z", 2)
    assert isinstance(levels, TwoLevels)
    return [dist.get_process_group_ranks(axis.group) for axis in (levels.inside, levels.across)]


def test_a_node_has_neighbors(pool: Pool) -> None:
    """Ranks of x are neighbors, so a node of four ranks has two ranks of z."""
    groups = pool.run(8, nodes_of)
    assert groups[0] == [[0, 2], [0, 4]]
    assert groups[7] == [[5, 7], [3, 7]]


class Recorded:
    """A collective that notes when it is waited for."""

    def __init__(self, what: str, events: list[str]) -> None:
        self.what, self.events = what, events
        events.append(f"{what} begins")

    def wait(self) -> bool:
        self.events.append(f"{self.what} ends")
        return True


def test_a_node_gathers_after_the_shards_of_other_nodes_arrive(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    assert pool.run(4, order_of_levels) == [["across begins", "across ends", "inside begins"]] * 4


def order_of_levels(rank: int, world_size: int) -> list[str]:
    grid, events = Grid(ParallelConfig(z=4), "cpu"), list[str]()
    levels = grid.shards("z", 2)
    assert isinstance(levels, TwoLevels)
    names = {levels.inside.group: "inside", levels.across.group: "across"}

    def gather(out: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool) -> Recorded:
        return Recorded(names[group], events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.parallel.data.fsdp_on_gloo.all_gather_single", gather)
        gathered = torch.zeros(4, LENGTH)
        GatherInBackground()(gathered.view(-1), gathered[levels.rank()], levels)
        levels.gathers.shutdown()
    return events


@pytest.mark.parametrize(
    ("grid", "per_node", "works"),
    [({"z": 4}, 3, 2), ({"z": 6}, 4, 3), ({"z": 4, "dp": 2, "zero": 1}, 3, 2), ({"z": 3, "dp": 4, "zero": 2}, 2, 1)],
    ids=str,
)
def test_nodes_that_do_not_divide_a_shard_group_are_refused(grid: dict[str, int], per_node: int, works: int) -> None:
    batch = {"global_batch_size": 24, "micro_batch_size": 1}
    with pytest.raises(
        UserError, match=rf"shards_per_node = {per_node} .*\(z = {grid['z']}\D.* shards_per_node = {works} works"
    ):
        tiny_run(LLAMA, grid, training=batch, overlap={"shards_per_node": per_node})
    tiny_run(LLAMA, grid, training=batch, overlap={"shards_per_node": works})


@pytest.mark.parametrize(
    ("grid", "per_node"), [({"z": 4}, 8), ({"z": 3, "dp": 4, "zero": 3}, 2), ({"z": 3, "dp": 2}, 3)], ids=str
)
def test_nodes_that_hold_whole_shard_groups_are_allowed(grid: dict[str, int], per_node: int) -> None:
    tiny_run(
        LLAMA,
        grid,
        training={"global_batch_size": 24, "micro_batch_size": 1},
        overlap={"shards_per_node": per_node},
    )


def test_input_and_output_of_one_shard_share_a_buffer() -> None:
    sums = SumOfOneShard()
    first, second, third = (sums.allocate((4,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(3))
    assert second is first and third is not first
