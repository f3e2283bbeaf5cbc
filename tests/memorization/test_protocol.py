"""The example runs: a few steps of two arms, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.config.load import load_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "memorization"


def test_the_arm_loads() -> None:
    run = load_run(EXAMPLE / "arm.toml")
    assert 0.9e6 < run.model.num_parameters < 1.2e6
    assert run.training.train_steps * run.training.global_batch_size * run.training.seq_length < 863_543


@pytest.mark.slow
def test_two_arms_side_by_side(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "protocol.py"), "--seeds", "1", "--steps", "3", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for arms in ("standard", "standard,noisy4"):  # what is done is not done again
        done = subprocess.run(
            [*command, "--arms", arms], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )
        assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["standard", "noisy4"]
    assert results["standard"]["documents"] == 16
    assert results["standard"]["nll_kept"] is None
    assert results["noisy4"]["near_duplicates"][0]["noise"] == 0.05
    assert (tmp_path / "results.md").read_text().count("\n") == 4
    assert "| standard | 1 | **0.0%**" in done.stdout
    assert done.stdout.count("model FLOPs per token") == 1
