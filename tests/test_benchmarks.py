"""Every benchmark runs, in its tiny form, on a CPU; its numbers mean nothing here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HELPERS = {"cache_traffic", "options", "peers", "ranks"}
BENCHMARKS = sorted({path.stem for path in Path(__file__).parents[1].glob("benchmarks/*.py")} - HELPERS)
ARGUMENTS = {"train_gpu": ["--device", "cpu", "--no-compile"], "train_cpu": ["--only", "b"]}
SLOW = {"pipeline_bubble", "train_cpu"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
def test_the_tiny_form_runs(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [name, "--tiny", *ARGUMENTS.get(name, [])])
    assert not importlib.import_module(f"benchmarks.{name}").main()
    output = capfd.readouterr().out
    assert output.strip() and "nan" not in output
