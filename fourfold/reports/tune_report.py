"""The page of a search: one HTML file, which needs no network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold.data.files import write_output
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES
from fourfold.reports import html
from fourfold.reports.basic_charts import Series, line_chart, stacked_bars
from fourfold.reports.numbers import counted
from fourfold.reports.scatter_charts import Dot, Group, Line, parallel_coordinates, scatter
from fourfold.reports.tables import print_table
from fourfold.reports.tune_sentences import ended_early, outcomes_of, summary_of

if TYPE_CHECKING:
    from fourfold.tuning.sensitivity import Sensitivity
    from fourfold.tuning.tune_record import TrialRecord, TuneRecord

WORDS = {"schedule": SCHEDULES, "cp_method": CP_METHODS, "recompute": RECOMPUTE, "offload": ("no", "yes")}
"""Knobs whose numbers stand for words."""


def write_tune_report(path: Path, result: TuneRecord) -> None:
    """Write a search's page: summary, history, parallel coordinates, memory against speed, sensitivity, all trials."""
    wide = [
        _history(result),
        _parallel(result),
        _memory(result),
        _sensitivity(result.planner, "the calibrated planner"),
    ]
    if result.trees is not None:
        wide.append(_sensitivity(result.trees, "trees fitted to the trials alone"))
    failures = "".join(f"<li>{escape(sentence)}</li>" for sentence in ended_early(result))
    sections = [
        html.facts(
            {
                "best step": f"{result.best_seconds:.4g} s",
                "trials": f"{len(result.trials)} ({outcomes_of(result)})",
                "legal layouts": result.layouts,
                "chance of one 2 % faster": "" if result.end.chance is None else f"{result.end.chance:.0%}",
                "trials took": f"{sum(t.result.wall_seconds for t in result.trials) / 60:.1f} min",
            }
        ),
        f"<p>{escape(summary_of(result))}</p>",
        html.charts([], wide),
        f"<h2>Trials that ended early</h2><ul>{failures}</ul>" if failures else "",
        "<h2>All trials</h2>",
        html.table([*COLUMNS, "why"], [[*_row(trial), trial.why] for trial in result.trials], words=True),
    ]
    title = f"Search for the fastest layout of {result.name}, on {counted(result.gpus, 'device')} of {result.machine}"
    write_output(path, html.page(title, result.best, sections))


COLUMNS = ("trial", "layout", "result", "s/step", "predicted", "GB")


def tune_tables(result: TuneRecord) -> None:
    """Print the trials, fastest first, and the summary."""
    from rich.console import Console

    order = sorted(result.trials, key=lambda trial: (trial.result.seconds is None, trial.result.seconds or 0))
    title = f"{result.name} on {counted(result.gpus, 'device')} of {result.machine}"
    print_table(title, COLUMNS, [_row(trial) for trial in order], words=("layout", "result"))
    console = Console(soft_wrap=True, highlight=False)
    console.print(summary_of(result), markup=False)
    for name, path in result.files.items():
        console.print(f"{name}: {path}", markup=False)


def _row(trial: TrialRecord) -> list[str]:
    result = trial.result
    return [
        str(trial.number),
        trial.layout,
        result.outcome,
        "" if result.seconds is None else f"{result.seconds:.4g}",
        f"{trial.predicted_seconds:.4g}",
        "" if result.memory_bytes is None else f"{result.memory_bytes / 1e9:.2f}",
    ]


def _history(result: TuneRecord) -> str:
    numbers = [float(position) for position in range(1, len(result.trials) + 1)]
    seconds = [trial.result.seconds for trial in result.trials]
    done = [t.result.seconds if t.result.outcome == "done" else None for t in result.trials]
    best: list[float | None] = []
    for value in done:
        so_far = [b for b in (best[-1] if best else None, value) if b is not None]
        best.append(min(so_far, default=None))
    failed = [None if s is not None else result.best_seconds for s in seconds]
    series = [
        Series("trial", numbers, seconds, dots=True, joined=False),
        Series("best so far", numbers, best),
        Series("predicted", numbers, [trial.predicted_seconds for trial in result.trials]),
        Series("failed (no time)", numbers, failed, dots=True, joined=False),
    ]
    kept = [each for each in series if any(value is not None for value in each.y)]
    return line_chart("Step time of the trials", kept, x_label="trials", y_label="seconds a step", log_y=True)


def _parallel(result: TuneRecord) -> str:
    varying = [name for name in result.trials[0].knobs if len({trial.knobs[name] for trial in result.trials}) > 1]
    times = [trial.result.seconds for trial in result.trials if trial.result.seconds is not None]
    slowest, fastest = max(times), min(times)
    lines = []
    for trial in result.trials:
        seconds = trial.result.seconds
        strength = 0.3 if seconds is None else (slowest - seconds) / (slowest - fastest) if slowest > fastest else 1.0
        values = [WORDS[name][int(v)] if name in WORDS else v for name in varying for v in [trial.knobs[name]]]
        last = trial.result.outcome if seconds is None else float(f"{seconds:.4g}")
        text = f"trial {trial.number}, {trial.layout}: {trial.result.outcome}"
        text += "" if seconds is None else f", {seconds:.4g} s"
        is_best = trial.layout == result.best
        color = "--s1" if is_best else "--s6" if seconds is None else "--s0"
        width, opacity = (3.0, 1.0) if is_best else (1.5, 0.2 + 0.8 * strength)
        lines.append(Line([*values, last], text, color, opacity, width, dashed=seconds is None))
    lines.sort(key=lambda line: (line.width, line.opacity))
    return parallel_coordinates(
        "Knobs of the trials; dark: fast, dashed: failed, orange: best", [*varying, "s/step"], lines
    )


def _memory(result: TuneRecord) -> str:
    """Failed trials have no time, and those that ran out no memory: the predictions stand for them, gray."""
    dots: dict[str, list[Dot]] = {"failed, as predicted": [], "trial": [], "best": []}
    for trial in result.trials:
        found = trial.result
        size = found.memory_bytes or trial.predicted_bytes
        seconds = found.seconds or trial.predicted_seconds
        text = f"trial {trial.number}, {trial.layout}: {found.outcome}, {seconds:.4g} s, {size / 1e9:.2f} GB"
        text += f" ({found.reason})" if found.reason else ""
        is_failed = found.outcome not in ("done", "hopeless")
        kind = "best" if trial.layout == result.best else "failed, as predicted" if is_failed else "trial"
        dots[kind].append(Dot(size / 1e9, seconds, text))
    groups = [
        Group(kind, dots[kind], color, size)
        for kind, color, size in zip(dots, ("--faint", "--s0", "--s1"), (8, 8, 12), strict=True)
    ]
    return scatter(
        "Step time against memory",
        groups,
        x_label="memory of the fullest process, GB",
        y_label="seconds a step",
        limit=result.memory / 1e9,
        limit_label=f"{result.memory / 1e9:.1f} GB",
    )


def _sensitivity(explained: Sensitivity, whose: str) -> str:
    error = "" if explained.error is None else f", error {explained.error:.0%} on held-out trials"
    title = f"How much a knob matters to {whose} ({explained.layouts} layouts{error})"
    bars = {name: {"": value} for name, value in explained.importance.items()}
    return stacked_bars(title, bars, x_label="mean |Shapley value| of log seconds")
