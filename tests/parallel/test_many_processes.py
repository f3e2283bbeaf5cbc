"""What matters with many processes: cores beside the GPU, and groups that are not made one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.config.run import ParallelConfig
from fourfold.parallel import numa
from fourfold.parallel.grid import Grid
from fourfold.parallel.process_group import warn_of_other_nodes, warn_of_slow_groups


@pytest.mark.parametrize(
    ("listed", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set()), (None, set())]
)
def test_cores_beside_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, cores: set[int]
) -> None:
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    if listed is not None:
        (tmp_path / "0000:01:00.0").mkdir()
        (tmp_path / "0000:01:00.0" / "local_cpulist").write_text(listed)
    assert numa.cores_beside("0000:01:00.0") == cores


def test_binding_only_takes_away() -> None:
    mine = os.sched_getaffinity(0)
    try:
        numa.bind_to({1000, 1001})
        assert os.sched_getaffinity(0) == mine
        numa.bind_to({min(mine), 1000})
        assert os.sched_getaffinity(0) == {min(mine)}
    finally:
        os.sched_setaffinity(0, mine)


@pytest.fixture
def many() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("many")
def test_groups_that_are_made_one_by_one_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    Grid(ParallelConfig(x=8, z=64), "cpu")
    assert capsys.readouterr().err == ""
    warn_of_slow_groups("cuda")
    assert "made one by one" in capsys.readouterr().err


def test_nodes_of_other_sizes_are_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    warn_of_other_nodes(8)  # no launcher says anything
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    warn_of_other_nodes(8)
    assert capsys.readouterr().err == ""
    warn_of_other_nodes(4)
    assert "nodes of 4 processes, and this one has 8" in capsys.readouterr().err
