"""Run parity on a simulated GPU. It gathers the grid's tensors on the CPU, and the references compute on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from low_precision import PrecisionError, precision_error
from pool import Pool
from simulated_gpu import GPU, simulated_gpu
from tiny_runs import DEEPSEEK, GEMMA2, GPT, LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.verification import parity as parity_module
from fourfold.verification.parity import parity
from fourfold.verification.parity_report import ParityReport

PACKED = {"data": {"source": "python-stdlib", "mask_documents": True}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (LLAMA, {}),
    "packed": (LLAMA, PACKED),
    "gpt": (GPT, {}),
    "experts": (DEEPSEEK, {}),
    "windows and caps": (GEMMA2, PACKED),
    "averages": (LLAMA, {"ema": {"decay": 0.9}, "optimizer": {"name": "muon"}}),
}


def parity_on_gpu(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    # Skip the trainer, because it reads properties that a simulated GPU lacks.
    with simulated_gpu(), patch.object(parity_module, "can_write", return_value=False):
        return parity(run, GPU, steps=1)


def error_on_gpu(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    with simulated_gpu():
        return precision_error(run, GPU, steps=1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_parity_runs_on_a_gpu(pool: Pool, name: str, tmp_path: Path) -> None:
    model, sections = CASES[name]
    run = tiny_run(model, output_dir=str(tmp_path), **sections)
    report = pool.run(1, parity_on_gpu, run)[0]
    assert report.ok, report.record()


def test_the_error_of_low_precision_is_measured_on_a_gpu(pool: Pool) -> None:
    error = pool.run(1, error_on_gpu, tiny_run(LLAMA, training={"precision": "bf16"}))[0]
    assert 0 < error.weights < error.gradients < 0.1


def test_the_simulated_gpu_raises_where_a_gpu_would_and_counts_waits() -> None:
    with simulated_gpu() as gpu:
        here, there = torch.arange(3.0), torch.arange(3.0, device=GPU)
        with pytest.raises(RuntimeError, match="same device"):
            here - there
        assert gpu.waits.total() == 0
        assert (there * 2).sum().item() == 6 and there.cpu().tolist() == [0, 1, 2]
        assert gpu.waits.total() == 2
