"""Run small jobs, and read the files that they write."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_corpus import run_file

from fourfold.checkpoints.find_checkpoints import list_checkpoints
from fourfold.config.run import RunConfig
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import trainer
from fourfold.training.metrics import read_metrics
from fourfold.training.outcome import Outcome


def make(folder: Path, prefix: str, **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return load_run(run_file(folder, prefix, **changes))


def train(run: RunConfig) -> Outcome:
    return run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")


def metrics_of(run: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def weights_of(run: RunConfig, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(run.output_dir, run.name, "checkpoints", f"step_{step}").glob("*.safetensors")):
        found |= load_file(file)
    assert found
    return found


def checkpoints_of(run: RunConfig) -> list[str]:
    return [path.name for path in list_checkpoints(Path(run.output_dir, run.name, "checkpoints"))]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Call ``action`` when a step (from 0) begins."""
    original = trainer.begin_step

    def begin_step(number: int) -> None:
        original(number)
        if number == step:
            action()

    monkeypatch.setattr(trainer, "begin_step", begin_step)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
