"""The page of one training run, made from the files in its folder."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.data.files import write_output
from fourfold.errors import UserError
from fourfold.reports import html
from fourfold.reports.basic_charts import Series, line_chart
from fourfold.reports.expert_charts import expert_maps
from fourfold.reports.numbers import counted
from fourfold.training.console import byte_unit, format_bytes
from fourfold.training.metrics import EXPERTS_FILE, MEMORIZATION_FILE, METRICS_FILE, read_metrics

Record = dict[str, Any]


def write_run_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html, one file without network access, and return its path.

    Reads run.toml and metrics.jsonl and, if they exist, sample.txt (generated text), experts.jsonl, memorization.jsonl
    and summary.json (an object of label to text or number). Raises UserError if run.toml or metrics.jsonl is missing,
    no step is recorded, or one of the records or summary.json cannot be read.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    if not records:
        raise UserError(f"{run_dir / METRICS_FILE} holds no step yet: wait for the first one.")
    run_file = run_dir / "run.toml"
    if not run_file.is_file():
        raise UserError(f"{run_file} does not exist: give the folder of a run, in which `fourfold train` puts it.")

    sections = [html.facts(_headline(records)), *_not_finite(records), _curves(records)]
    sections += [*_experts(run_dir, records), *_memorization(run_dir), *_summary(run_dir)]
    sample = run_dir / "sample.txt"
    if sample.is_file():
        sections.append(html.text_block("Sample", _read_text(sample), wrap=True))
    sections.append(html.text_block("Run file", _read_text(run_file)))

    report = run_dir / "report.html"
    name = run_dir.resolve().name
    write_output(report, html.page(name, f"fourfold training run, {_steps(len(records))} recorded", sections))
    return report


def _headline(records: Sequence[Record]) -> dict[str, str | int | float | None]:
    """Return the most important numbers; None where nothing was recorded."""
    last, speed = records[-1], _numbers(records, "tokens_per_second")
    memory, validation = _numbers(records, "peak_memory_bytes"), _numbers(records, "validation_loss")
    utilization = _numbers(records, "mfu")
    return {
        "step": last["step"],
        "tokens": _number(last, "tokens"),
        "loss, last step": _number(last, "loss"),
        "validation loss, last": validation[-1] if validation else None,
        "tokens/s, median": round(median(speed)) if speed else None,
        "MFU, median": f"{median(utilization):.1%}" if utilization else None,
        "peak memory": format_bytes(max(memory)) if memory else None,
    }


def _not_finite(records: Sequence[Record]) -> list[str]:
    """Note steps whose loss was not a number: in the curves they are gaps, which may be too thin to see."""
    steps = [record["step"] for record in records if _number(record, "loss") is None]
    if not steps:
        return []
    return [html.notice(f"The loss was not a finite number at {_steps(len(steps))}, first at step {steps[0]:,}.")]


def _steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"


def _curves(records: Sequence[Record]) -> str:
    train, validation = _series("train", records, "loss"), _series("validation", records, "validation_loss")
    losses = [train, validation] if validation.x else [train]
    unit_name, unit = byte_unit(max(_numbers(records, "peak_memory_bytes"), default=0))
    memory = _series("peak of the fullest device", records, "peak_memory_bytes", unit)
    norm, lr = _series("before clipping", records, "grad_norm"), _series("", records, "lr")
    speed = _series("all devices", records, "tokens_per_second")
    chart = partial(line_chart, x_label="tokens")
    loss = chart("Loss", losses, log_y=True, height=340)
    others = [
        chart("Gradient norm", [norm], log_y=True),
        chart("Learning rate", [lr], from_zero=True),
        chart("Throughput, tokens/s", [speed], from_zero=True),
        chart(f"Memory, {unit_name}", [memory], from_zero=True),
    ]
    return html.charts(others, wide=[loss])


def _experts(run_dir: Path, records: Sequence[Record]) -> list[str]:
    """Chart the experts of a mixture: the busiest at every step, and heat maps; nothing for dense models."""
    shown = _short_record(run_dir / EXPERTS_FILE)
    if not shown:
        return []
    load = _series("of any layer, relative to the mean", records, "expert_load")
    chart = line_chart("Load of the busiest expert", [load], x_label="tokens", from_zero=True)
    return ["<h2>Experts</h2>", html.charts([chart, *expert_maps(shown)])]


def _short_record(path: Path) -> list[Record]:
    return read_metrics(path) if path.is_file() else []


def _memorization(run_dir: Path) -> list[str]:
    """Chart the canaries during training by their number of repeats; nothing without [audit]."""
    records = _short_record(run_dir / MEMORIZATION_FILE)
    if not records:
        return []
    charts = []
    for key, title in (("exact_match", "Canaries repeated exactly"), ("loss", "Loss of the canaries")):
        series = [
            Series(
                counted(int(count), "time") if count.isdecimal() else count,
                [record["tokens"] for record in records],
                [record["by_count"][count][key] for record in records],
                dots=len(records) <= 60,
            )
            for count in records[-1]["by_count"]
        ]
        charts.append(line_chart(title, series, x_label="tokens", from_zero=True))
    return ["<h2>Memorization</h2>", html.charts(charts)]


def _series(name: str, records: Sequence[Record], key: str, unit: float = 1.0) -> Series:
    """Return the values of one key against tokens; null is a gap, a line without the key no point."""
    rows = [(_number(r, "tokens"), _number(r, key)) for r in records if key in r]
    points = [(x, y) for x, y in rows if x is not None]
    y = [None if y is None else y / unit for _, y in points]
    return Series(name, [x for x, _ in points], y, dots=len(points) <= 60)


def _summary(run_dir: Path) -> list[str]:
    path = run_dir / "summary.json"
    if not path.is_file():
        return []
    try:
        summary = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno} is not JSON; fix or delete the file.") from None
    if not isinstance(summary, dict) or any(isinstance(value, dict | list) for value in summary.values()):
        raise UserError(f"{path} is not an object of label to text or number; fix or delete the file.")
    return ["<h2>Summary</h2>", html.facts(summary)] if summary else []


def _read_text(path: Path) -> str:
    """Read a text, with � for what is not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace")


def _number(record: Record, key: str) -> float | None:
    value = record.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _numbers(records: Sequence[Record], key: str) -> list[float]:
    return [value for record in records if (value := _number(record, key)) is not None]
