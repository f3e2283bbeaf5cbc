"""fourfold machine doctor: the whole command on this machine, and each judgment on good and bad figures."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_line import Cli
from pool import Pool

from fourfold.doctor import collective_test, devices, examine
from fourfold.doctor.collective_test import AllReduceTimes, all_reduce, examine_collective, nccl_network
from fourfold.doctor.devices import gpu_state, host, query_gpus
from fourfold.doctor.finding import Finding, error, ok
from fourfold.doctor.shared_memory import shared_memory
from fourfold.doctor.versions import torch_build
from fourfold.environment import Place
from fourfold.launch.local_workers import WorkerFailed

SUBJECTS = ("python", "torch", "backend", "host", "shared memory", "all-reduce")

GIB = 2**30


def test_this_machine(cli: Cli) -> None:
    code, output, errors = cli("machine", "doctor", "--json")
    assert errors == ""
    record = json.loads(output)
    found = {finding["subject"]: finding for finding in record["findings"]}
    assert set(SUBJECTS) <= set(found)
    assert code == (0 if record["ok"] else 1)
    assert all((finding["advice"] is None) == (finding["level"] == "ok") for finding in record["findings"])
    assert found["all-reduce"]["level"] == "ok", found["all-reduce"]
    if not torch.cuda.is_available():
        assert "gloo over 2 processes: exact; " in found["all-reduce"]["text"]
        assert found["all-reduce"]["figures"]["bandwidth"] > 0


def some(*findings: Finding) -> object:
    def examined(*_: object) -> Iterator[Finding]:
        yield from findings

    return examined


def test_an_error_makes_the_exit_code_1(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "examine_shared_memory", some(error("disk", "it is full", "make room")))
    monkeypatch.setattr(examine, "examine_collective", some(ok("all-reduce", "exact")))
    code, output, errors = cli("machine", "doctor")
    assert (code, errors) == (1, "")
    assert ["error", "disk", "it", "is", "full"] in [line.split() for line in output.splitlines()]
    assert ["→", "make", "room"] in [line.split() for line in output.splitlines()]
    assert "1 error, " in output.splitlines()[-1]


def test_other_processes_of_a_launcher(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine except the first, one process prints what is wrong there. All other processes print nothing."""
    monkeypatch.setattr(examine, "examine_collective", some(ok("all-reduce", "exact")))
    monkeypatch.setattr(examine, "examine_shared_memory", some(error("disk", "it is full", "make room")))
    monkeypatch.setattr(socket, "gethostname", lambda: "nid7")
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nid6"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli("machine", "doctor") == (0, "", "")
    assert cli("machine", "doctor", "--json") == (0, "", "")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    code, output, _ = cli("machine", "doctor")
    assert code == 1
    assert "nid7: it is full" in output
    assert "python" not in output and "findings" not in output
    code, output, _ = cli("machine", "doctor", "--json")
    assert (code, output.count("\n")) == (1, 1)
    record = json.loads(output)
    assert (record["host"], record["ok"]) == ("nid7", False)
    assert {"python", "disk"} <= {finding["subject"] for finding in record["findings"]}


@pytest.mark.parametrize(
    ("build", "level", "text"),
    [
        (("2.13.0+cpu", None, None, 0, []), "ok", "2.13.0+cpu, built for the CPU alone"),
        (("2.13.0+cu130", "13.0", None, 8, ["NVIDIA"]), "ok", "built for CUDA 13.0"),
        (("2.13.0+rocm7.1", None, "7.1", 8, ["AMD"]), "ok", "built for ROCm 7.1"),
        (("2.13.0+cpu", None, None, 0, ["NVIDIA"]), "warning", "the CPU alone, sees none of the NVIDIA GPUs here"),
        (("2.13.0+cu130", "13.0", None, 0, ["NVIDIA"]), "warning", "CUDA 13.0, sees none of the NVIDIA GPUs here"),
        (("2.10.0", "12.8", None, 8, ["NVIDIA"]), "error", "2.10.0, built for CUDA 12.8"),
    ],
)
def test_builds_of_torch(build: tuple[str, str | None, str | None, int, list[str]], level: str, text: str) -> None:
    finding = torch_build(*build)
    assert finding.level == level
    assert text in finding.text


GPU = {
    "uuid": "GPU-1",
    "driver_version": "580.65",
    "clocks.sm": "1755",
    "clocks.max.sm": "1980",
    "temperature.gpu": "61",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_event_reasons.active": "0x0000000000000004",
}


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, "ok", "NVIDIA H100, 80.00 GiB, driver 580.65, 1755 of 1980 MHz, 61 °C"),
        ({"clocks_event_reasons.active": "0x0000000000000040"}, "warning", "slowed by heat"),
        ({"clocks_event_reasons.active": "0x0000000000000088"}, "warning", "by its hardware, slowed by its power"),
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "error", "2 uncorrected memory errors"),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]", "clocks_event_reasons.active": "[N/A]"}, "ok", "61 °C"),
    ],
)
def test_states_of_a_gpu(changed: dict[str, str], level: str, text: str) -> None:
    finding = gpu_state("GPU 0", "NVIDIA H100", 80 * GIB, GPU | changed)
    assert finding.level == level
    assert text in finding.text


def test_each_gpu_is_found_by_its_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for nvidia-smi prints one line for each of two GPUs."""
    values = ", ".join([*list(GPU.values())[:-1], "0x40"])
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/bash\necho "{values}"\necho "{values}" | tr 1 2\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [gpu["uuid"] for gpu in query_gpus(*GPU)] == ["GPU-1", "GPU-2"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = type("Properties", (), {"name": "NVIDIA H100", "total_memory": 80 * GIB, "uuid": "1"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    gpu, _ = devices.examine_devices()
    assert (gpu.level, gpu.subject) == ("warning", "GPU 0")
    assert "slowed by heat" in gpu.text


def test_fewer_cores_than_gpus() -> None:
    """On some machines, torchrun inside srun gets only one core for all processes."""
    assert host(56, 512 * GIB, 8).level == "ok"
    assert host(1, 512 * GIB, 8).level == "warning"
    assert host(1, GIB, 0).level == "ok"


@pytest.mark.parametrize(("free", "level"), [(GIB, "ok"), (64 * 2**20, "warning"), (2**20, "error")])
def test_shared_memory(free: int, level: str) -> None:
    assert shared_memory(4 * GIB, free).level == level


def corrupted_on(rank: int, world_size: int, wrong: int) -> AllReduceTimes:
    """Measure with one bit of the sum flipped on a rank."""
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        original(tensor)
        if rank == wrong and tensor.numel() > world_size:
            tensor[12_345] ^= 1

    dist.all_reduce = all_reduce
    try:
        return collective_test.measure(Place(rank, rank, world_size, world_size, "local"))
    finally:
        dist.all_reduce = original


def test_a_wrong_sum_is_found_and_its_rank_named(pool: Pool) -> None:
    measured = pool.run(2, corrupted_on, 1)[0]
    assert measured.wrong == (1,)
    assert all_reduce(measured).level == "error"
    assert all_reduce(measured).text == "gloo over 2 processes: wrong sums on rank 1"


def test_speed_of_an_all_reduce() -> None:
    """In a ring of four, each rank sends 1.5 times the bytes of the tensor."""
    measured = AllReduceTimes("nccl", 4, 1_000_000_000, seconds=0.01, latency=20e-6, wrong=())
    assert all_reduce(measured).text == "nccl over 4 processes: exact; 150.00 GB/s, latency 20 µs"
    alone = AllReduceTimes("nccl", 1, 1000, seconds=0.01, latency=20e-6, wrong=())
    assert all_reduce(alone).text == "nccl over 1 process: exact; one device sends nothing"


def test_an_all_reduce_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WorkerFailed("worker 1 of 2 failed:\nTraceback\nDistBackendError: NCCL error: unhandled cuda error")

    monkeypatch.setattr(collective_test, "run_on_grid", fail)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    (finding,) = examine_collective(None)
    assert finding.level == "error"
    assert "failed: DistBackendError: NCCL error: unhandled cuda error" in finding.text


def test_the_network_of_nccl() -> None:
    log = "nid1:7:9 [0] NCCL INFO Using network {0}\n" * 2
    assert list(nccl_network("", several_machines=True)) == []
    assert next(nccl_network(log.format("AWS Libfabric"), several_machines=True)).level == "ok"
    assert next(nccl_network(log.format("Socket"), several_machines=False)).level == "ok"
    slow = next(nccl_network(log.format("Socket"), several_machines=True))
    assert (slow.level, slow.text) == ("warning", "NCCL uses the network Socket")
