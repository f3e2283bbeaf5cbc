"""Sampling of slow tests: each seed gives another order, and no test starts after the deadline."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from sampling import wants_gpus

from fourfold.environment import Place
from fourfold.launch.job_processes import choose_device

pytest_plugins = ["pytester"]


def outcome(pytester: pytest.Pytester, *options: str) -> tuple[list[str], str]:
    """Return the names of the tests that ran, in order, and the last lines of output."""
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from sampling import wants_gpus, Sampling, add_options as pytest_addoption\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(Sampling(config.getoption('--sample'), config.getoption('--minutes')))\n"
    )
    pytester.makepyfile(test_ten="import pytest\n@pytest.mark.parametrize('i', range(10))\ndef test_one(i): pass\n")
    result = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", *options)
    assert result.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    names = [line.split("[")[1].split("]")[0] for line in result.outlines if "PASSED" in line]
    return names, "\n".join(result.outlines[-3:])


def test_a_seed_decides_the_order(pytester: pytest.Pytester) -> None:
    first, _ = outcome(pytester, "--sample", "a")
    again, _ = outcome(pytester, "--sample", "a")
    other, _ = outcome(pytester, "--sample", "b")
    assert first == again != other
    assert sorted(first) == sorted(other) == [str(i) for i in range(10)]


def test_no_test_starts_after_the_deadline(pytester: pytest.Pytester) -> None:
    names, end = outcome(pytester, "--sample", "a", "--minutes", "0")
    assert not names
    assert "ran 0 of 10 selected tests (--sample a)" in end


def test_a_long_matrix_keeps_a_few_fast_cases(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    slow: s\n    fast_cases(n): f\n")
    pytester.makeconftest(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import pytest\nfrom sampling import wants_gpus, mark_long_matrices\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_long_matrices(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n@pytest.mark.fast_cases(3)\n@pytest.mark.parametrize('i', range(9))\ndef test_one(i): pass\n"
        "def test_other(): pass\n"
    )
    fast = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", "-m", "not slow")
    assert [line.split("[")[1].split("]")[0] for line in fast.outlines if "test_one" in line] == ["1", "4", "7"]
    fast.assert_outcomes(passed=4, deselected=6)


@pytest.mark.parametrize(
    ("markers", "wanted"),
    [("not slow", False), ("", False), ("not gpu", False), ("gpu", True), ("gpu and not slow", True)],
)
def test_only_the_tests_of_gpus_see_a_gpu(markers: str, wanted: bool) -> None:
    assert wants_gpus(markers) is wanted


def test_workers_compute_on_the_cpu_of_a_machine_with_a_gpu(pool: Pool, request: pytest.FixtureRequest) -> None:
    """Otherwise, with ``device = "auto"``, each of the two processes would try to use a GPU."""
    if wants_gpus(request.config.getoption("markexpr")):
        pytest.skip("-m gpu shows the GPUs")
    assert pool.run(2, device_beside_a_gpu) == ["cpu", "cpu"]


def device_beside_a_gpu(rank: int, world_size: int) -> str:
    """Return the device that a process chooses, if torch reports one GPU whenever GPUs are not hidden."""
    visible = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 1
    with patch.object(torch.cuda, "device_count", lambda: visible):
        return choose_device(Place(rank, rank, world_size, world_size, launcher="local"), "auto").type
