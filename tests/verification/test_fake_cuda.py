"""Training steps on fake CUDA tensors: no operation mixes devices, and the host waits only at the lines named here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import layouts
import layouts_of_experts
import pytest
import test_parity
import torch

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import AXES
from fourfold.huggingface.architectures.written_config import config_of

SCRIPT = Path(__file__).parents[1] / "fake_cuda_steps.py"
FIGURES = "step_checks.py:figures_of_all_ranks: reads numbers"
"""The only wait of a step, for the loss, the gradient norm, and the flags of all ranks."""

COUNTS = "grouped.py:read: waits for an event"
"""The wait for the row counts of an exchange, because NCCL takes them from the host. The copy of the counts to the host
starts earlier, before the rows are collected. There is one wait per layer with experts and micro-batch. A recomputed
layer does not wait again."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU the step itself shows it")

FAST = {
    "x2 y2, y shares the batch": 0,
    "z2 dp2 zero 3 goldfish packed": 0,
    "experts, dp2, experts whole": 0,
    "experts, y2 ep2 z2": 4,
    "experts, x2 ep2 dp2": 4,
    "multi-token, cp2 ring packed": 0,
    "linear attention, x2 preferences": 0,
}
"""Cases of the fast test, with their number of waits for row counts. There are two layers with experts and two
micro-batches."""


def waits(*names: str) -> dict[str, dict[str, int]]:
    """Return the lines that make the host wait in a step, for each named case, or for all cases if no names are
    given."""
    done = subprocess.run([sys.executable, str(SCRIPT), *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


def expected(counts: int) -> dict[str, int]:
    return {FIGURES: 1, COUNTS: counts} if counts else {FIGURES: 1}


def test_a_step_waits_for_the_gpu_once_and_for_the_counts_of_experts() -> None:
    assert waits(*FAST) == {name: expected(counts) for name, counts in FAST.items()}


def test_the_cases_have_every_family_and_every_axis() -> None:
    """The slow test takes a step of each family on each axis, and with experts also along ep."""
    types = {config_of(ModelConfig(**preset))["model_type"] for preset in PRESETS.values()}
    assert types <= test_parity.FAMILIES.keys()
    assert set(AXES) == test_parity.ONE_AXIS.keys()
    experts = layouts_of_experts.CASES | layouts_of_experts.SLOW_CASES
    assert {"ep"} <= {axis for _, grid, _ in experts.values() for axis in grid}


@pytest.mark.slow
def test_no_case_of_the_parity_suite_waits_elsewhere() -> None:
    found = waits()
    assert found.keys() >= layouts.CASES.keys() | {f"experts, {name}" for name in layouts_of_experts.SLOW_CASES}
    others = {
        name: lines for name, lines in found.items() if lines.get(FIGURES) != 1 or lines.keys() - {FIGURES, COUNTS}
    }
    assert not others
