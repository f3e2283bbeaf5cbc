"""Jobs with many processes stay cheap: each process gets cores next to its GPU, and groups are not created one by
one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from simulated_gpu import simulated_gpu
from torch.testing._internal.distributed.fake_pg import FakeStore

from fourfold.config.run import ParallelConfig
from fourfold.environment import Place
from fourfold.parallel.grid import numa, process_group
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.process_group import warn_of_other_nodes


@pytest.mark.parametrize(
    ("listed", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set()), (None, set())]
)
def test_cores_next_to_a_device(
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


@pytest.mark.parametrize(
    ("hip", "queues", "left_alone"),
    [
        (None, "CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES"),
        ("7", "GPU_MAX_HW_QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
    ids=["NVIDIA", "AMD"],
)
def test_settings_of_a_gpu_are_made_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, queues: str, left_alone: str
) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: seen.append(dict(os.environ)))
    monkeypatch.setattr(process_group, "bind_to_gpu", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for name in ("TORCH_NCCL_HIGH_PRIORITY", queues, left_alone):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def start() -> dict[str, str]:
        place = Place(0, 0, 1, 1, launcher="local")
        process_group.start_process_group(place, None, torch.device("cuda", 0), timedelta(minutes=1))
        return seen[-1]

    assert start()["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert int(seen[-1][queues]) > 4 and left_alone not in seen[-1]
    if hip is None:
        assert seen[-1]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "what replayed steps need"
        assert seen[-1]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    os.environ[queues] = "3"
    assert start()[queues] == "3", "the user's own setting stays"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_allocator_settings_win(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    process_group.set_up_gpu()
    of_allocator = {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key}
    assert of_allocator == {name: "max_split_size_mb:64"}


def test_a_program_that_used_its_gpu_too_early_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    for is_used, told in ((False, ""), (True, "before fourfold could set CUDA_DEVICE_MAX_CONNECTIONS, PYTORCH_ALLOC")):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        own = {"TORCH_NCCL_HIGH_PRIORITY": "0", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
        monkeypatch.setattr(os, "environ", own)
        process_group.set_up_gpu()
        assert told in (errors := capsys.readouterr().err) and bool(errors) == is_used
    process_group.set_up_gpu()
    assert not capsys.readouterr().err, "all are set"


def test_settings_of_a_gpu_are_made_for_a_group_that_the_program_started(
    pool: Pool,
) -> None:
    assert pool.run(1, settings_after_a_grid) == [":4096:8"]


def settings_after_a_grid(rank: int, world_size: int) -> str | None:
    with patch.dict(os.environ):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        with simulated_gpu():
            Grid(ParallelConfig(), "cuda")
        return os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_nodes_of_other_sizes_are_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    warn_of_other_nodes(8)  # no launcher has set the number of local processes
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    warn_of_other_nodes(8)
    assert capsys.readouterr().err == ""
    warn_of_other_nodes(4)
    assert "nodes with 4 processes, but this node has 8" in capsys.readouterr().err
