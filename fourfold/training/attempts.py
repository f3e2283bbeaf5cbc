"""Record each attempt to train a run: its start, and its end if it ended normally. From this record, a restarted job
detects a step that fails in every attempt."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import writing
from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.training.bad_steps import BadSteps, samples_of
from fourfold.training.metrics import steps_taken
from fourfold.training.run_folder import ATTEMPTS_FILE


def note_start(run_dir: Path, restarts: int, run: RunConfig, first_step: int) -> None:
    """Record that this attempt of the run starts to train. Only rank 0 calls this.

    If the next step has failed more than ``fault_tolerance.max_restarts`` times, and ``failing_step`` is "skip", also
    record that this step's batch is left out.

    Args:
        run_dir: Folder of the run.
        restarts: How many times the launcher has restarted the job before this attempt.
        run: The run's settings.
        first_step: Number of finished steps in the checkpoint that the attempt resumes from. 0 without a checkpoint.

    Raises:
        UserError: The next step has failed too often. Either ``failing_step`` is "stop", or the step failed although
            its batch was left out.
    """
    taken = steps_taken(run_dir)
    failures = _failures(_read(run_dir), taken) if restarts else 0
    if failures > run.fault_tolerance.max_restarts:
        _answer_failures(run_dir, taken + 1, failures, run)
    _append(run_dir, {"restarts": restarts, "steps_taken": taken, "first_step": first_step})


def note_end(run_dir: Path) -> None:
    """Record that this attempt ended normally."""
    _append(run_dir, {"ended": True})


def count_starts(run_dir: Path) -> int:
    """Return how many attempts of a run have begun to train."""
    return sum("restarts" in line for line in _read(run_dir))


def resumed_at(run_dir: Path) -> list[int]:
    """Return the number of finished steps at each resume from a checkpoint, in ascending order.

    If a later attempt started again from an earlier step, the resumes after that earlier step are left out.
    """
    steps: list[int] = []
    for line in _read(run_dir):
        first = line.get("first_step")
        # This attempt repeats all steps after ``first``, so drop the resumes of earlier attempts after ``first``.
        if isinstance(first, int):
            steps = [step for step in steps if step < first] + [first] * (first > 0)
    return steps


def _answer_failures(run_dir: Path, step: int, failures: int, run: RunConfig) -> None:
    limit = run.fault_tolerance.max_restarts
    reason = f"step {step} failed {failures} times in a row (fault_tolerance.max_restarts = {limit})"
    if run.fault_tolerance.failing_step == "stop":
        raise UserError(
            f"{reason}; read what the attempts printed, then start the run again, or set "
            "fault_tolerance.failing_step = 'skip' to leave out a batch that fails every time"
        )
    bad_steps = BadSteps(run_dir)
    if any(step in line.get("skips", ()) for line in bad_steps.read()):
        raise UserError(f"{reason}, although its batch was left out; read what the attempts printed")
    samples = samples_of(step, run.training.global_batch_size)
    bad_steps.note({"step": step, "action": "leave_out", "reason": reason, "samples": samples, "skips": [step]})
    print(f"fourfold: {reason}; the batch of this step is left out; see {bad_steps.path}", file=sys.stderr)


def _failures(lines: list[dict[str, Any]], taken: int) -> int:
    """Return how many of the latest attempts in a row failed in step ``taken`` + 1."""
    failures = 1 if lines and "ended" not in lines[-1] else 0
    for line in reversed(lines):
        if line.get("steps_taken") != taken or not line.get("restarts"):
            break
        failures += 1
    return failures


def _read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in ``ATTEMPTS_FILE``, one per line. Skip a line that a crash has cut off."""
    path, lines = run_dir / ATTEMPTS_FILE, []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n"):
        with suppress(ValueError):
            if isinstance(read := parse_json(line), dict):
                lines.append(read)
    return lines


def _append(run_dir: Path, line: dict[str, Any]) -> None:
    path = run_dir / ATTEMPTS_FILE
    is_torn = path.is_file() and not (b"\n" + path.read_bytes()).endswith(b"\n")
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_torn + json.dumps(line) + "\n")
