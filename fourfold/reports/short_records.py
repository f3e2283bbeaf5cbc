"""Read tasks.jsonl and memorization.jsonl from a run's folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fourfold.training.metrics import read_metrics


class TaskRecord(BaseModel):
    """A line of tasks.jsonl. ``tasks`` has the metrics of each task, and ``failed`` has the reason for each task that
    failed."""

    tasks: dict[str, dict[str, float | None]]
    failed: dict[str, str] = {}


class CanaryGroup(BaseModel):
    """Audit results for the canaries that the model was trained on the same number of times."""

    exact_match: float
    loss: float


class MemorizationRecord(BaseModel):
    """A line of memorization.jsonl. It groups canaries by the number of times that the model was trained on them. The
    group "all" has all canaries."""

    by_count: dict[str, CanaryGroup]


def read_short_record(path: Path, shape: type[BaseModel]) -> list[dict[str, Any]]:
    """Read a record and check that each line has the given shape. Return an empty list if there is no file.

    Raises:
        UserError: A line is damaged or has another shape.
    """
    return read_metrics(path, partial(_check, shape)) if path.is_file() else []


def _check(shape: type[BaseModel], record: dict[str, Any]) -> None:
    try:
        shape.model_validate(record, strict=True)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
