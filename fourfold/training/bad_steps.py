"""Read and write bad_steps.jsonl in a run's folder. This file tells a resumed run which batches to leave out."""

import json
from pathlib import Path
from typing import Any

from fourfold.data.atomic_files import write_whole, writing
from fourfold.training.metrics import read_metrics

BAD_STEPS_FILE = "bad_steps.jsonl"


class BadSteps:
    """The file bad_steps.jsonl in a run's folder. Only rank 0 reads and writes the file.

    Each line describes a step that was bad, that stopped the run, or that failed in too many attempts. If a line has
    the key ``skips``, this key lists the steps whose batches the run leaves out.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / BAD_STEPS_FILE

    def read(self) -> list[dict[str, Any]]:
        """Return the file's lines as dictionaries, oldest first.

        Raises:
            UserError: A line has no integer ``step``, or its ``skips`` are not a list of steps.
        """
        return read_metrics(self.path, _check) if self.path.is_file() else []

    def note(self, line: dict[str, Any]) -> None:
        """Append a line about a bad step to the file. The caller does this before the run acts on the step."""
        with writing(self.path):
            before = self.path.read_bytes() if self.path.exists() else b""
            write_whole(self.path, before + json.dumps(line).encode() + b"\n")

    def set_aside(self) -> None:
        """Rename an earlier run's file, so that a run that starts from scratch does not read it."""
        if self.path.is_file():
            with writing(self.path):
                self.path.replace(self.path.with_name(f"{self.path.name}.superseded"))


def samples_of(step: int, global_batch_size: int) -> list[int]:
    """Return the indices of the samples in a step's batch (the first step is 1). Samples are numbered from 0, in the
    order of training."""
    return list(range((step - 1) * global_batch_size, step * global_batch_size))


def _check(line: dict[str, Any]) -> None:
    skips = line.get("skips", [])
    if not isinstance(skips, list) or not all(type(step) is int for step in skips):
        raise ValueError(f"skips = {json.dumps(skips)} must be a list of steps, such as [{line['step']}]")
