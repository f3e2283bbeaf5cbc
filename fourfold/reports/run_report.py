"""Write HTML reports of training runs from the files in their folders, and pages that compare several runs."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fourfold.data.atomic_files import write_output
from fourfold.errors import UserError
from fourfold.parsing import dotted_keys, parse_json, parse_toml
from fourfold.planning.calibration.measured_run import RunComparison
from fourfold.reports import html
from fourfold.reports.curve_charts import CONTROLS, Curve, StepPositions, curve_chart
from fourfold.reports.numbers import counted
from fourfold.reports.recorded_run import Record, RecordedRun, largest, number_of, read_run, read_summary, read_text
from fourfold.training.console import byte_unit, format_fact
from fourfold.training.metrics import MEMORIZATION_FILE, TASKS_FILE, read_metrics
from fourfold.training.planner_check import PREDICTION_FILE, facts_of
from fourfold.training.run_folder import SAMPLE_FILE, SUMMARY_FILE


def write_run_report(run_dir: Path, reload_seconds: int | None = None) -> Path:
    """Write the report of a run to ``run_dir``/report.html, one file that needs no network, and return its path.

    The report is made from the files in ``run_dir``. run.toml and metrics.jsonl must exist. The report also uses these
    files if they exist: sample.txt (generated text), memorization.jsonl, tasks.jsonl, audit/audit.json, prediction.json
    (the planner's prediction), and summary.json (an object that maps labels to text or numbers).

    Args:
        run_dir: The run's folder.
        reload_seconds: Number of seconds after which the page reloads itself, for a run that is still training. None:
            the page does not reload itself.

    Raises:
        UserError: run.toml or metrics.jsonl is missing, no step is recorded, another file is damaged, or the report
            cannot be written.
    """
    run = read_run(Path(run_dir), os.path.basename(os.path.realpath(run_dir)))
    facts = {label: value for label, value in run.headline().items() if value is not None}
    if run.resumed:
        facts["resumed after step"] = ", ".join(f"{step:,}" for step in run.resumed)
    sections = [html.facts(facts), *_planned(run), *_not_finite(run), CONTROLS, _curves([run])]
    sections += [*_tasks(run), *_memorization(run), *_audit(run)]
    summary, sample = read_summary(run.folder / SUMMARY_FILE), run.folder / SAMPLE_FILE
    if summary:
        sections += ["<h2>Summary</h2>", html.facts(summary)]
    if sample.is_file():
        sections.append(html.text_block("Sample", read_text(sample)))
    sections.append(html.folded("Run file", run.run_file))
    subtitle = f"fourfold training run, {counted(len(run.records), 'step')} recorded"
    if reload_seconds is not None:
        subtitle += f". Training continues, and this page reloads itself every {counted(reload_seconds, 'second')}."
    report = run.folder / "report.html"
    write_output(report, html.page(run.name, subtitle, sections, reload_seconds=reload_seconds))
    return report


def write_comparison(run_dirs: Sequence[Path], path: Path) -> None:
    """Write a page that overlays the curves of several runs and lists the differences between their run files.

    The page's table has the losses at the last step that all runs have recorded. A folder that is given twice counts
    once.

    Args:
        run_dirs: The folders of the runs.
        path: The HTML file to write.

    Raises:
        UserError: The run.toml or metrics.jsonl of a run is missing or damaged, no step is recorded, or the page cannot
            be written.
    """
    folders = list(dict.fromkeys(Path(os.path.realpath(folder)) for folder in run_dirs))
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        shared = os.path.commonpath([folder.parent for folder in folders])
        names = [os.path.relpath(folder, shared) for folder in folders]
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    common, validated = (
        max(set.intersection(*(run.steps_with(key) for run in runs)), default=None)
        for key in ("loss", "validation_loss")
    )
    headlines = [run.headline(common, validated) for run in runs]
    rows = [[run.name, *map(format_fact, facts.values())] for run, facts in zip(runs, headlines, strict=True)]
    sections = [
        html.table(["run", *headlines[0]], rows),
        *_compared_at(runs, common, validated),
        *(note for run in runs for note in _not_finite(run, f" of {run.name}")),
    ]
    sections += [CONTROLS, _curves(runs), *_differences(runs)]
    write_output(path, html.page(", ".join(names), f"{counted(len(runs), 'fourfold training run')} compared", sections))


def _compared_at(runs: Sequence[RecordedRun], common: int | None, validated: int | None) -> list[str]:
    """Return an HTML paragraph that says from which step the losses in the table are. ``common`` is this step for
    training losses, and ``validated`` for validation losses. None means that the runs have no such step in common."""
    places = [("losses", "loss", common), ("validation losses", "validation_loss", validated)]
    said = [
        f"The {what} of the table are {'from different steps' if step is None else f'from step {step:,}'}, "
        f"{'because no step was recorded by all runs' if step is None else 'the last step that all runs recorded'}."
        for what, key, step in places
        if len(runs) > 1 and all(run.steps_with(key) for run in runs)
    ]
    return [f"<p>{escape(' '.join(said))}</p>"] if said else []


def _not_finite(run: RecordedRun, whose: str = "") -> list[str]:
    """Return a note if the loss was not finite at some steps. At these steps, the curve has gaps, which can be too
    narrow to see."""
    steps = [record["step"] for record in run.records if number_of(record, "loss") is None]
    if not steps:
        return []
    text = f"The loss{whose} was not a finite number at {counted(len(steps), 'step')}, first at step {steps[0]:,}."
    return [html.notice(text)]


def _curves(runs: Sequence[RecordedRun]) -> str:
    """Return HTML with charts of the metrics that each step records. With one run, each kind of loss has its own color.
    With several runs, each run has its own color."""
    unit_name, unit = byte_unit(largest(runs, "peak_memory_bytes"))
    is_one = len(runs) == 1
    losses, marks = [], []
    for color, run in enumerate(runs):
        validation = "validation" if is_one else _validation_of(run, runs)
        losses.append(Curve("train" if is_one else run.name, run.points("loss"), color))
        losses.append(Curve(validation, run.points("validation_loss"), color + is_one, marked=True))
        if is_one:
            losses.append(Curve("validation of averages", run.points("ema_validation_loss"), 2, marked=True))
        marks += [(run.places[step], color) for step in run.resumed]

    def of(title: str, key: str, of_unit: str, scale: float = 1.0, *, smooth: bool = True, zero: bool = True) -> str:
        curves = [Curve(title if is_one else run.name, run.points(key, scale), c) for c, run in enumerate(runs)]
        return curve_chart(title, curves, unit=of_unit, marks=marks, smooth=smooth, from_zero=zero)

    in_nats = all(run.is_in_nats for run in runs)
    unit_of_loss = "nats per token" if in_nats else ""
    loss = curve_chart("Loss", losses, unit=unit_of_loss, marks=marks, is_loss=in_nats, height=360)
    others = [
        of("Gradient norm", "grad_norm", "before clipping", zero=False),
        of("Learning rate", "lr", "", smooth=False),
        of("Throughput", "tokens_per_second", "tokens per second, all devices"),
        of("Memory", "peak_memory_bytes", f"{unit_name}, peak of the fullest device", unit, smooth=False),
    ]
    if any(run.numbers("mfu") for run in runs):
        others.append(of("Model FLOPs utilization", "mfu", "% of the devices' peak", 0.01))
    if any(run.numbers("expert_load") for run in runs):
        others.append(of("Load of the busiest expert", "expert_load", "of any layer, relative to the mean"))
    return html.charts(others, wide=[loss])


def _validation_of(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    """Return a name for the curve of a run's validation losses. It must differ from the names of all runs, because the
    legend has one button per name.
    """
    name = f"{run.name}, validation"
    while name in {other.name for other in runs}:
        name += " loss"
    return name


def _records_of(run: RecordedRun, name: str, key: str) -> list[Record]:
    """Read the JSON lines of a file in the run's folder. In each line, ``key`` maps names to tables of scores. Return
    an empty list if there is no file."""

    def check(record: Record) -> None:
        tables = record.get(key)
        if not isinstance(tables, dict) or not all(isinstance(scores, dict) for scores in tables.values()):
            raise ValueError(f'"{key}" does not map names to tables of scores')
        if not isinstance(record.get("failed", {}), dict):
            raise ValueError('"failed" does not map names to reasons')

    path = run.folder / name
    return read_metrics(path, check) if path.is_file() else []


def _tasks(run: RecordedRun) -> list[str]:
    """Return HTML sections about the lm-eval tasks during training: a chart for each metric, and a note if tasks
    failed."""
    found: dict[str, dict[str, list[tuple[StepPositions, float | None]]]] = {}
    failures: list[str] = []
    for record in _records_of(run, TASKS_FILE, "tasks"):
        failures += [f"After step {record['step']:,}: {why}." for why in record.get("failed", {}).values()]
        if record["step"] in run.places:
            for task, metrics in record["tasks"].items():
                for metric in metrics:
                    value = number_of(metrics, metric)
                    found.setdefault(metric, {}).setdefault(task, []).append((run.places[record["step"]], value))
    charts = [
        curve_chart(metric, [Curve(task, points, c, marked=True) for c, (task, points) in enumerate(tasks.items())],
                    unit=metric)
        for metric, tasks in found.items()
    ]  # fmt: skip
    notes = [html.notice(f"{counted(len(failures), 'evaluation')} failed. {failures[0]}")] if failures else []
    return ["<h2>Tasks</h2>", *notes, html.charts(charts)] if charts or notes else []


def _memorization(run: RecordedRun) -> list[str]:
    """Return HTML sections with charts of the canary audits during training. Each chart has one curve for each number
    of times that canaries were repeated. Return an empty list if no audit is recorded."""
    records = [each for each in _records_of(run, MEMORIZATION_FILE, "by_count") if each["step"] in run.places]
    if not records:
        return []

    def of(key: str, scale: float) -> list[Curve]:
        curves = []
        for color, count in enumerate(records[-1]["by_count"]):
            audited = [record for record in records if count in record["by_count"]]
            values = [(run.places[each["step"]], number_of(each["by_count"][count], key)) for each in audited]
            points = [(place, None if value is None else value / scale) for place, value in values]
            name = counted(int(count), "time") if count.isdecimal() else count
            curves.append(Curve(name, points, color, marked=True))
        return curves

    exact = curve_chart("Canaries repeated exactly", of("exact_match", 0.01), unit="% of the canaries", from_zero=True)
    loss = curve_chart("Loss of the canaries", of("loss", 1.0), unit="nats per token", is_loss=True)
    return ["<h2>Memorization</h2>", html.charts([exact, loss])]


def _audit(run: RecordedRun) -> list[str]:
    """Return HTML sections with the main results of the audit that ``fourfold audit --out RUN/audit`` has written.
    Return an empty list if there is none."""
    path = run.folder / "audit" / "audit.json"
    if not path.is_file():
        return []
    from fourfold.reports.audit_report import audit_summary  # This import takes long, and few runs need it.

    try:
        sections = audit_summary(parse_json(read_text(path)))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path} is not the record of an audit; run fourfold audit again, or delete the file") from None
    link = '<p><a href="audit/audit.html">All results of the audit</a></p>'
    return ["<h2>Memorization audit</h2>", *sections, link]


def _planned(run: RecordedRun) -> list[str]:
    """Return HTML sections that compare the planner's prediction for the run with the measurement. Return an empty list
    without a prediction. A run has one if ``metrics.machine`` was set."""
    path = run.folder / PREDICTION_FILE
    if not path.is_file():
        return []
    try:
        facts = facts_of(RunComparison(**parse_json(read_text(path))))
    except (ValueError, TypeError, ZeroDivisionError):
        raise UserError(f"{path} is not a prediction that `fourfold train` has written; delete the file") from None
    return ["<h2>Planned and measured</h2>", html.facts(facts)]


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Return HTML sections with a table of the keys whose values differ between the run files."""
    keys = [_flat(run) for run in runs]
    names = sorted(set().union(*keys) - {"name"})
    rows = [[name, *(each.get(name, "") for each in keys)] for name in names if len({k.get(name) for k in keys}) > 1]
    heading = "<h2>What differs in the run files</h2>"
    if not rows:
        return [heading, f"<p>{escape('Nothing but the name.')}</p>"]
    return [heading, html.table(["key", *(run.name for run in runs)], rows)]


def _flat(run: RecordedRun) -> dict[str, str]:
    """Return the values of a run's run file, as texts. The keys have the form section.key. Raise ``UserError`` if the
    file is not valid TOML."""
    try:
        tables = parse_toml(run.run_file)
    except ValueError as error:
        raise UserError(f"{run.folder / 'run.toml'} is not TOML ({error}); fix the file.") from None
    return {key: str(value) for key, value in dotted_keys(tables)}
