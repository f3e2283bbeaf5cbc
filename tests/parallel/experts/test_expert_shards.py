"""Ranks that hold the same experts shard them evenly, also if there are more ranks than experts."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import MIXTURE, tiny_run

from fourfold.models.mixture import Experts
from fourfold.parallel.experts.experts import ParallelExperts
from fourfold.parallel.grid.grid import Grid
from fourfold.verification.trace import fake_processes


@pytest.mark.parametrize(
    ("experts", "axes", "shards", "splits_experts"),
    [
        (8, {"dp": 4, "z": 2, "ep": 2, "zero": 1}, 4, False),
        (4, {"dp": 4, "z": 2, "ep": 2, "zero": 1}, 4, True),
        (4, {"dp": 4, "z": 2, "ep": 2}, 1, False),
        (6, {"dp": 4, "zero": 3}, 4, True),
        (8, {"z": 8}, 8, False),
        (4, {"z": 8}, 8, True),
        (4, {"dp": 8}, 1, False),
    ],
    ids=str,
)
def test_every_rank_gets_the_same_share(experts: int, axes: dict[str, int], shards: int, splits_experts: bool) -> None:
    run = tiny_run(MIXTURE | {"num_experts": experts, "mlp_bias": True}, axes, training={"global_batch_size": 16})
    with fake_processes(run.parallel.world_size):
        grid = Grid(run.parallel, "cpu")
        with torch.device("meta"):
            held = ParallelExperts(Experts(run.model), grid)
    for name, parameter in held.named_parameters():
        assert held.tiles[name].turned == splits_experts, name
        assert parameter.shape[0] % shards == 0, name
        assert held.weight(name).shape[0] == experts // run.parallel.ep, name
