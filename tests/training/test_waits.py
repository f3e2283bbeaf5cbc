"""The host reads values from tensors only once per step, because on a GPU it must wait for them. Inside
``Job.train_step``, it reads none, because ``trace`` runs this function on tensors without values.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_corpus import run_file

import fourfold
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
PROGRAM = Path(fourfold.__file__).parent


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the program's calls of methods that read a tensor's values, by file and method."""
    counted: Counter[str] = Counter()

    def watch(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def counting(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            caller = Path(frame.f_back.f_code.co_filename)
            if caller.is_relative_to(PROGRAM):
                counted[f"{caller.relative_to(PROGRAM)}: {name}"] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counting)

    for name in READS:
        watch(name)
    return counted


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_reads_its_figures_once(prefix: str, tmp_path: Path, reads: Counter[str], precision: str) -> None:
    counts = []
    for steps in (3, 7):
        reads.clear()
        folder = tmp_path / str(steps)
        folder.mkdir()
        changes = {"training__train_steps": steps, "training__precision": precision, "validation__interval": 0}
        run = load_run(run_file(folder, prefix, **changes))
        run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")
        counts.append(Counter(reads))
    assert counts[1] - counts[0] == {"training/step_checks.py: tolist": 4}
