"""Read a run's records from its folder, for its report and for comparisons of runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.errors import UserError
from fourfold.parsing import parse_json
from fourfold.reports.curve_charts import StepPositions
from fourfold.training.attempts import resumed_at
from fourfold.training.console import format_bytes
from fourfold.training.metrics import METRICS_FILE, read_metrics
from fourfold.training.run_folder import RUN_FILE

Record = dict[str, Any]


@dataclass(frozen=True)
class RecordedRun:
    """The recorded steps of a run. ``name`` is the label of the run's curves. ``records`` has the metrics of each
    step."""

    folder: Path
    name: str
    records: Sequence[Record]
    run_file: str
    resumed: Sequence[int] = field(default=())
    """Steps of the checkpoints that the run was resumed from."""

    @cached_property
    def places(self) -> dict[int, StepPositions]:
        """Return for each step where its end is on the three possible x axes: the step's index, the tokens read so far,
        and the seconds trained so far."""
        seconds = accumulate(number_of(record, "step_seconds") or 0.0 for record in self.records)
        return {
            record["step"]: StepPositions(record["step"], number_of(record, "tokens") or 0, until)
            for record, until in zip(self.records, seconds, strict=True)
        }

    @property
    def is_in_nats(self) -> bool:
        """Return whether the losses are in nats per token. This is not so in preference optimization ([dpo])."""
        return not self.numbers("dpo_margin")

    def points(self, key: str, unit: float = 1.0) -> list[tuple[StepPositions, float | None]]:
        """Return the points (position, value) of a curve with the values of one key, divided by ``unit``. A value that
        is not finite becomes None, a gap. Steps without the key have no point."""
        values = [(self.places[record["step"]], number_of(record, key)) for record in self.records if key in record]
        return [(place, None if value is None else value / unit) for place, value in values]

    def numbers(self, key: str) -> list[float]:
        """Return all finite values of one key, in the order of the steps."""
        return [value for record in self.records if (value := number_of(record, key)) is not None]

    def steps_with(self, key: str) -> set[int]:
        """Return the indices of all steps with a finite value of a key."""
        return {record["step"] for record in self.records if number_of(record, key) is not None}

    def headline(self, step: int | None = None, validated: int | None = None) -> dict[str, str | int | float | None]:
        """Return the most important values by label. A value that was not recorded is None.

        By default, the losses are from the last step and from the last validation. ``step`` selects another step for
        the training loss and the number of tokens. ``validated`` selects the step whose validation loss is shown.
        """
        last, speed = self.records[-1], self.numbers("tokens_per_second")
        memory, utilization = self.numbers("peak_memory_bytes"), self.numbers("mfu")
        losses = [(r["step"], value) for r in self.records if (value := number_of(r, "validation_loss")) is not None]
        loss = next((value for at, value in reversed(losses) if validated in (None, at)), None)
        shown = last if step is None else next(record for record in self.records if record["step"] == step)
        seconds = self.places[last["step"]].seconds
        perplexity = math.exp(loss) if self.is_in_nats and loss is not None and loss < 700 else None
        return {
            "step": last["step"],
            "tokens" + _at(step, ""): number_of(shown, "tokens"),
            "loss" + _at(step, ", last step"): number_of(shown, "loss"),
            "validation loss" + _at(validated, ", last"): loss,
            "validation perplexity": None if perplexity is None else f"{perplexity:.4g}",
            "tokens/s, median": round(median(speed)) if speed else None,
            "MFU, median": f"{median(utilization):.1%}" if utilization else None,
            "peak memory": format_bytes(max(memory)) if memory else None,
            "training time": duration(seconds) if seconds else None,
        }


def read_run(folder: Path, name: str) -> RecordedRun:
    """Read the recorded steps of a run. ``name`` is the label of its curves.

    Raises:
        UserError: The folder or its run.toml does not exist, no step is recorded, or the record is damaged.
    """
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist: give the folder of a run, runs/NAME.")
    records = read_metrics(folder / METRICS_FILE)
    if not records:
        raise UserError(f"{folder / METRICS_FILE} holds no step yet: wait for the first step.")
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        raise UserError(f"{run_file} does not exist: give the folder of a run, which `fourfold train` makes.")
    steps = {record["step"] for record in records}
    resumed = [step for step in resumed_at(folder) if step in steps and step < records[-1]["step"]]
    return RecordedRun(folder, name, records, read_text(run_file), resumed)


def _at(step: int | None, otherwise: str) -> str:
    return otherwise if step is None else f" at step {step:,}"


def number_of(record: Record, key: str) -> float | None:
    """Return the value of a key if it is a finite number, and None otherwise."""
    value = record.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def duration(seconds: float) -> str:
    """Format seconds in the largest unit (h, min, or s) that gives a value of at least 1: 42 s, 3.5 min, 12.3 h."""
    name, size = next(((n, s) for n, s in (("h", 3600), ("min", 60)) if seconds >= s), ("s", 1))
    return f"{seconds / size:,.3g} {name}" if seconds / size < 1000 else f"{seconds / size:,.0f} {name}"


def read_text(path: Path) -> str:
    """Read a text file. Bytes that are not UTF-8 become �."""
    return path.read_text(encoding="utf-8", errors="replace")


def read_summary(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object that maps labels to text or numbers. If there is no file, return an empty
    dictionary.

    Raises:
        UserError: The file is not JSON, or does not contain such an object.
    """
    if not path.is_file():
        return {}
    try:
        summary = parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); fix or delete the file.") from None
    if not isinstance(summary, dict) or any(isinstance(value, dict | list) for value in summary.values()):
        raise UserError(f"{path} does not map labels to text or numbers; fix or delete the file.")
    return summary


def largest(runs: Iterable[RecordedRun], key: str) -> float:
    """Return the largest finite value of a key over some runs, or 0 if there is none."""
    return max((value for run in runs for value in run.numbers(key)), default=0.0)
