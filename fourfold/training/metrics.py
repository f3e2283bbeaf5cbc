"""The record of a run: one JSON object per step in metrics.jsonl."""

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fourfold.data.files import write_output, writing
from fourfold.errors import UserError, first_line
from fourfold.parsing import parse_json

if TYPE_CHECKING:
    import torch

METRICS_FILE, MEMORIZATION_FILE, EXPERTS_FILE = "metrics.jsonl", "memorization.jsonl", "experts.jsonl"
TASKS_FILE = "tasks.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The numbers of one optimizer step; the fields are the keys of metrics.jsonl.

    Global over all ranks, except where a name says otherwise. Numbers that are not finite are written as null: JSON
    has none.
    """

    step: int  # counted from 1
    loss: float  # mean over the trained tokens, nats per token
    grad_norm: float | None  # before clipping
    lr: float
    tokens: int  # seen since the beginning of the run, masked ones included
    tokens_per_second: float
    model_tflops_per_device: float
    mfu: float | None  # fraction of the peak; None where the peak is unknown
    peak_memory_bytes: int  # of the fullest device, or of the process on CPU
    step_seconds: float
    trained_token_share: float  # tokens that carry loss / all tokens of the step; with [dpo] of pairs
    validation_loss: float | None = None  # only on steps that evaluate; absent from the others' lines
    skipped: bool = False  # the update was not applied; absent from the lines of steps that were
    more: Mapping[str, float] = field(default_factory=dict)  # figures that only some runs have, each a key of the line

    def record(self) -> dict[str, int | float | None]:
        """The JSON object of this step."""
        values: dict[str, int | float | None] = asdict(self)
        del values["more"]
        values |= self.more
        record = {key: v if v is None or math.isfinite(v) else None for key, v in values.items()}
        if self.validation_loss is None:
            del record["validation_loss"]
        if not self.skipped:
            del record["skipped"]
        return record


class MetricsWriter:
    """Appends steps to `run_dir`/metrics.jsonl.

    Every line is flushed, so a crash costs at most the line being written. `resume_step` N continues the record of a
    run whose checkpoint is of step N: lines of later steps are dropped, since those steps are trained again.

    Raises UserError when an earlier record cannot be read, or the disk is full.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0) -> None:
        path = run_dir / METRICS_FILE
        self._path = path
        with writing(path):
            run_dir.mkdir(parents=True, exist_ok=True)
            if path.exists():
                _drop_after(path, resume_step)
            # Without a buffer, whose rest would fail again when the file is closed.
            self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step, a `StepMetrics.record`."""
        line = _to_line(record).encode()
        with writing(self._path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: Path, check: Callable[[dict[str, Any]], object] | None = None) -> list[dict[str, Any]]:
    """Read a metrics.jsonl: its objects, in the order of the file.

    A last line without an end of line that does not parse was torn by a crash and is left out; so are empty lines.
    Raises UserError with the line number for any other line that is not a JSON object with an integer "step", and
    when there is no such file. So it does for a line whose object `check` refuses with a ValueError, whose first line
    says what is wrong.
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
        if not isinstance(record, dict) or type(record.get("step")) is not int:  # True is one too
            raise UserError(f'{path}, line {number} is not an object with an integer "step": fix or delete that line.')
        try:
            if check is not None:
                check(record)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {first_line(error)}: fix or delete that line.") from None
        records.append(record)
    return records


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Write one more line to a short record, beside which metrics.jsonl has every step.

    Lines of the same step and of later ones go: they are from before the run was resumed, or went back. Raises
    UserError where the file cannot be read or written.
    """
    earlier = read_metrics(path) if path.is_file() else []
    lines = [*(each for each in earlier if each["step"] < record["step"]), record]
    write_output(path, "".join(map(_to_line, lines)))


def steps_taken(run_dir: Path) -> int:
    """The steps in the record of a run; 0 where there is none."""
    metrics = run_dir / METRICS_FILE
    return max((record["step"] for record in read_metrics(metrics)), default=0) if metrics.is_file() else 0


def peak_memory_bytes(device: "torch.device") -> int:
    """The most memory used so far: what PyTorch allocated on a GPU, or the resident size of this process on CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource  # POSIX only, so not at the top of a file that reports read too

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the record without the lines of later steps, by rename, so that no crash can lose it."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    unfinished = path.with_suffix(".jsonl.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(_to_line(record) for record in kept)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
