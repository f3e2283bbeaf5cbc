"""Every benchmark runs, in its tiny form, on a CPU; its numbers mean nothing here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = {
    "accelerators",
    "cache_traffic",
    "cluster_order",
    "cluster_overlap",
    "cluster_runs",
    "gpu",
    "limits",
    "options",
    "peers",
    "ranks",
    "startup_job",
}
BENCHMARKS = sorted({path.stem for path in Path(__file__).parents[1].glob("benchmarks/*.py")} - HELPERS)
ARGUMENTS = {
    "train_gpu": ["--device", "cpu", "--no-compile"],
    "train_cpu": ["--only", "b"],
    "loki_decode": ["--kernels", "torch"],  # the others compile for seconds
}
SLOW = {
    "moe_cpu",
    "one_step",
    "pipeline_bubble",
    "products",
    "scale",
    "startup",
    "train_cpu",
    "tuner_cpu",
    "tuner_replay",
    "watchdog_cost",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
def test_the_tiny_form_runs(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna" if name.startswith("tuner") else "transformers")
    monkeypatch.setattr(sys, "argv", [name, "--tiny", *ARGUMENTS.get(name, [])])
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # as some set it: it must not stay for other tests
    assert not importlib.import_module(f"benchmarks.{name}").main()
    output = capfd.readouterr().out
    assert output.strip() and "nan" not in output


def gpu_record(out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu", str(out), "--device", "cpu", "--tiny"])
    code = importlib.import_module("benchmarks.gpu").main()
    return code, json.loads((out / "gpu.json").read_text())


@pytest.mark.slow
def test_one_command_answers_what_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    code, record = gpu_record(tmp_path, monkeypatch)
    assert set(record["parts"]) == {
        "doctor",
        "kernels",
        "one_step",
        "products",
        "train_gpu",
        "loki_decode",
        "parity",
        "pipeline_bubble",
    }
    assert {part["result"] for part in record["parts"].values()} == {"done"}
    assert all(part["figures"] for part in record["parts"].values())
    assert code == 0


def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "good": ["-c", "print('[1]')"],
        "bad": ["-c", "raise SystemExit(3)"],
        "slow": ["-c", "import time; time.sleep(60)"],
    }
    monkeypatch.setattr("benchmarks.gpu.parts", lambda *_: programs)
    run = subprocess.run

    def run_or_be_late(command: list[str], **options: Any) -> Any:
        if "time.sleep" in command[-1]:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return run(command, **options)

    monkeypatch.setattr("benchmarks.gpu.subprocess.run", run_or_be_late)
    code, record = gpu_record(tmp_path, monkeypatch)
    assert code == 1
    results = {name: (part["result"], part["figures"]) for name, part in record["parts"].items()}
    assert results == {"good": ("done", [1]), "bad": ("exit code 3", None), "slow": ("not done in 600 s", None)}
