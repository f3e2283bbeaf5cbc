"""The commands on one device, as users start them: parity, training, saving a checkpoint, and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_corpus import run_file

from fourfold.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
Command = Callable[..., str]


@pytest.mark.slow
def test_one_process_computes_what_float64_does(
    command: Command, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    one = [f"--set=parallel.{axis}=1" for axis in ("x", "y")]
    output = command("parity", ROOT / "examples/parity.toml", *one, f"--set=training.device={device.type}", "--json")
    record = json.loads(output)
    record_property("parity", record)
    assert record["ok"]


def test_a_run_resumes_from_an_async_save(command: Command, device: torch.device, prefix: str, tmp_path: Path) -> None:
    """The steps of the resumed run equal the steps of an uninterrupted run. The second run replays every step."""
    sizes = {"training__train_steps": 6, "training__precision": "bf16", "training__device": device.type}
    file = run_file(tmp_path, prefix, **sizes, checkpoint__interval=3, checkpoint__async_mode="async")
    command("train", file, "--set=name=whole")
    for steps in (3, 6):
        more = ["--set=checks.replay_interval=1"] if steps == 6 else []
        command("train", file, "--set=name=resumed", f"--set=training.train_steps={steps}", *more)
    whole, resumed = (
        {record["step"]: record["loss"] for record in read_metrics(tmp_path / "runs" / name / "metrics.jsonl")}
        for name in ("whole", "resumed")
    )
    assert list(resumed) == list(whole) == [1, 2, 3, 4, 5, 6]
    assert resumed == pytest.approx(whole, rel=0 if device.type == "cpu" else 1e-2)
