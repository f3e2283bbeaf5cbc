"""The starts of a run by a launcher that restarts it, so that a step which fails every time is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fourfold.data.files import writing
from fourfold.errors import UserError
from fourfold.training.metrics import steps_taken
from fourfold.training.run_folder import ATTEMPTS_FILE


def note_start(run_dir: Path, restarts: int, max_restarts: int) -> None:
    """Record, on rank 0, that an attempt begins to train.

    Raises ``UserError`` where the step that comes next has failed more than ``max_restarts`` times.
    """
    taken = steps_taken(run_dir)
    failures = _failures(_read(run_dir), taken) if restarts else 0
    if failures > max_restarts:
        raise UserError(
            f"step {taken + 1} failed {failures} times in a row (fault_tolerance.max_restarts = {max_restarts}); "
            "after a look at what the attempts printed, start the run again"
        )
    _append(run_dir, {"restarts": restarts, "steps_taken": taken})


def note_end(run_dir: Path) -> None:
    """Record that this attempt ended as it should."""
    _append(run_dir, {"ended": True})


def _failures(lines: list[dict[str, Any]], taken: int) -> int:
    """How many attempts in a row ended in the step after ``taken``: the last one, and those before."""
    failures = 1 if lines and "ended" not in lines[-1] else 0
    for line in reversed(lines):
        if line.get("steps_taken") != taken or not line.get("restarts"):
            break
        failures += 1
    return failures


def _read(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines: a crash may have torn the last one."""
    path = run_dir / ATTEMPTS_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _append(run_dir: Path, line: dict[str, Any]) -> None:
    path = run_dir / ATTEMPTS_FILE
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
