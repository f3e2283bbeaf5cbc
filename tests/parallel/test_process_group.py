"""A grid in a program of the user's own: the process group that it starts, or what it says instead."""

import pytest
import torch.distributed as dist

import fourfold
from fourfold.errors import UserError


def test_a_grid_of_several_processes_needs_a_launcher() -> None:
    with pytest.raises(UserError, match=r"this grid needs 4 processes, and no launcher started them.*nproc-per-node 4"):
        fourfold.Grid(fourfold.ParallelConfig(x=2, y=2), "cpu")
    assert not dist.is_initialized()


def test_a_grid_of_one_process_needs_none() -> None:
    try:
        grid = fourfold.Grid(fourfold.ParallelConfig(), "cpu")
        assert dist.get_backend() == "gloo"
        assert {axis.size for axis in grid.axes()} == {1}
    finally:
        dist.destroy_process_group()
