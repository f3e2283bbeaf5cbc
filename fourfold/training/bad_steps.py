"""The record of bad steps: bad_steps.jsonl in a run's folder, from which a resumed run reads what to leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.data.files import write_whole, writing
from fourfold.training.metrics import read_metrics

BAD_STEPS_FILE = "bad_steps.jsonl"


def read_bad_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines so far, oldest first. Raises ``UserError`` for a line whose ``skips`` are no steps."""
    path = run_dir / BAD_STEPS_FILE
    return read_metrics(path, _check) if path.is_file() else []


def note_bad_step(run_dir: Path, line: dict[str, Any]) -> None:
    """Append a line, by rename: it is there before anything is done about the step."""
    path = run_dir / BAD_STEPS_FILE
    with writing(path):
        before = path.read_bytes() if path.exists() else b""
        write_whole(path, before + json.dumps(line).encode() + b"\n")


def set_bad_steps_aside(run_dir: Path) -> None:
    """Rename the record of a run that starts anew."""
    path = run_dir / BAD_STEPS_FILE
    if path.is_file():
        with writing(path):
            path.replace(path.with_name(f"{path.name}.superseded"))


def samples_of(step: int, global_batch_size: int) -> list[int]:
    """The numbers, in the order of training, of the sequences of a step that is counted from 1."""
    return list(range((step - 1) * global_batch_size, step * global_batch_size))


def leaves_out(line: dict[str, Any], step: int) -> bool:
    """True where this line says that the batch of a step, counted from 1, is to be left out."""
    return step in line.get("skips", ())


def _check(line: dict[str, Any]) -> None:
    skips = line.get("skips", [])
    if not isinstance(skips, list) or not all(type(step) is int for step in skips):
        raise ValueError(f"skips = {json.dumps(skips)} must be a list of steps, such as [{line['step']}]")
