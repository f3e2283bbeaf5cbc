"""Write and read metrics.jsonl, which has one line of JSON per training step."""

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.data.atomic_files import write_output, writing
from fourfold.errors import UserError, first_line
from fourfold.parsing import parse_json

if TYPE_CHECKING:
    import torch

METRICS_FILE, MEMORIZATION_FILE, EXPERTS_FILE = "metrics.jsonl", "memorization.jsonl", "experts.jsonl"
TASKS_FILE = "tasks.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics of one optimizer step. The fields are the keys of metrics.jsonl.

    Metrics are over all ranks unless the name says otherwise. JSON has no infinity and no NaN, so numbers that are not
    finite are written as null.
    """

    step: int  # Step number. The first step is 1.
    loss: float  # Mean over the tokens in the loss, in nats per token. In preference training, mean over pairs.
    grad_norm: float  # Global gradient norm before clipping.
    lr: float
    tokens: int  # Number of tokens since the beginning of the run, including masked tokens.
    tokens_per_second: float
    model_tflops_per_device: float
    mfu: float | None  # Fraction of the peak FLOP/s. None if the peak is unknown.
    peak_memory_bytes: int  # Largest peak memory of any GPU, or of any process if there are no GPUs.
    step_seconds: float
    trained_token_share: float  # Fraction of tokens that are in the loss. In preference training, fraction of pairs.
    # Metrics that only some runs or steps have, such as validation_loss. Each becomes a key of the line.
    more: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, int | float | None]:
        """Return the JSON object of this step."""
        values = asdict(self)
        values |= values.pop("more")
        return {key: v if v is None or math.isfinite(v) else None for key, v in values.items()}


class MetricsWriter:
    """Appends steps to `run_dir`/metrics.jsonl.

    Lines are written without buffering, so a crash loses at most the line that is being written.

    Args:
        run_dir: Folder of the run.
        resume_step: Number of finished steps in the checkpoint that the run resumes from, or 0. Lines of later steps
            are removed, because the run trains these steps again.

    Raises:
        UserError: An earlier record cannot be read, or the file cannot be written.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0) -> None:
        path = run_dir / METRICS_FILE
        self._path = path
        with writing(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _drop_after(path, resume_step)
            # Open the file unbuffered. A buffer would repeat a failed write when the file is closed, and that write
            # would fail again.
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of one step (`StepMetrics.record`)."""
        line = _to_line(record).encode()
        with writing(self._path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()


def read_metrics(path: Path, check: Callable[[dict[str, Any]], object] | None = None) -> list[dict[str, Any]]:
    """Return the objects of a metrics.jsonl, in the order of the file.

    Empty lines are skipped. The last line is also skipped if a crash has cut it off.

    Args:
        path: The file to read.
        check: Function that is called with each object. It raises a ValueError if the object is wrong.

    Raises:
        UserError: There is no such file, or a line is not a JSON object with an integer "step", or `check` refuses it.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: give the folder of a run that has trained at least one step.")
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode())
        except ValueError:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is not JSON: fix or delete that line.") from None
        # Compare the exact type, because True is also an int.
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f'{path}, line {number} is not an object with an integer "step": fix or delete that line.')
        try:
            if check is not None:
                check(record)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {first_line(error)}: fix or delete that line.") from None
        records.append(record)
    return records


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines that has records only of some steps, such as steps with an evaluation.

    Existing records of this step and of later steps are removed, because the run has resumed or rolled back since.

    Raises:
        UserError: The file cannot be read or written.
    """
    earlier = read_metrics(path) if path.is_file() else []
    lines = [*(each for each in earlier if each["step"] < record["step"]), record]
    write_output(path, "".join(map(_to_line, lines)))


def steps_taken(run_dir: Path) -> int:
    """Return the highest step number in a run's metrics.jsonl, or 0 if there is none."""
    metrics = run_dir / METRICS_FILE
    return max((record["step"] for record in read_metrics(metrics)), default=0) if metrics.is_file() else 0


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak memory of this process so far, in bytes. On a GPU, this is the memory that PyTorch allocated. On
    the CPU, this is the resident size."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # Import resource only here. The module exists only on POSIX, but reports import this file on every system.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # ru_maxrss is in bytes on macOS and in KiB elsewhere.


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _drop_after(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``. The new file replaces the old one by a rename, so a crash cannot lose
    lines."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(_to_line(record) for record in kept)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
