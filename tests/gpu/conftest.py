"""Fixtures for tests that run on two devices: on a GPU with `pytest -m gpu`, and in a tiny form on a CPU with all other
tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import Cli

ROOT = Path(__file__).parents[2]
NEEDS_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine"),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_A_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device under test."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=[pytest.param("cuda", marks=NEEDS_A_GPU)])
def gpu(request: pytest.FixtureRequest) -> torch.device:
    """Return the GPU, for figures that only a GPU has."""
    return torch.device(request.param, 0)


@pytest.fixture
def command(device: torch.device, cli: Cli) -> Callable[..., str]:
    """Return a function that runs ``fourfold ARGUMENTS`` and returns its output. On a GPU, it runs in a new process, as
    users start it."""

    def run(*arguments: object) -> str:
        words = list(map(str, arguments))
        if device.type == "cpu":
            code, output, errors = cli(*words)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "fourfold", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        assert code == 0, f"exit code {code}\n{output[-2000:]}\n{errors[-4000:]}"
        return output

    return run
