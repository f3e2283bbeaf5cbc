"""Print plans, scaling curves, and validations in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fourfold.planning.search.fastest import TIED
from fourfold.reports.layout_columns import CHOICES, choices, gigabytes, predicted
from fourfold.reports.numbers import format_number
from fourfold.reports.tables import least_width, print_table

if TYPE_CHECKING:
    from fourfold.planning.calibration.validation import Validation
    from fourfold.planning.plan_record import PlanRecord
    from fourfold.planning.scaling import ScalingPoint


SCORES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "Ranking within sweeps: rows that differ only in layout": ("sweeps", {
        "sweeps": ("count", "{}"), "mean regret": ("regret_mean", "{:.1%}"), "largest": ("regret_max", "{:.1%}"),
        "ranked": ("ranked", "{}"), "median rank correlation": ("spearman_median", "{:.2f}"),
        "lowest": ("spearman_min", "{:.2f}"),
    }),
    "Memory": ("memory", {
        "rows with GB": ("rows", "{}"), "mean error": ("mean_abs_error", "{:.1%}"), "bias": ("bias", "{:+.1%}"),
        "ran out of memory": ("out_of_memory_rows", "{}"), "predicted to run out": ("oom_recall", "{:.0%}"),
        "fitted": ("fitting_rows", "{}"), "predicted to fit": ("fit_recall", "{:.0%}"),
    }),
}  # fmt: skip
"""Tables that a validation prints below its table of errors. The title of a table maps to two things: its key in the
validation's record, and its columns. The header of a column maps to the key of its value, and the value's format."""
COLUMNS = {"best": "best", "runner_up": "best on another grid", "yours": "yours"}
"""Headers of the columns of an explanation, which shows one layout per column. The keys are the layouts' names in the
record."""
WORDS = ("", "recompute", "also")
"""Headers of the columns in the table of layouts whose cells are words. Such cells may have line breaks."""
PARTS_NAMED = 7
"""Largest number of parts into which the time of a step is divided. The smallest parts become one part, "other"."""
FLOP_NOTE = (
    "Model PFLOP/s count the same FLOPs as MFU: no recompute, and only unmasked attention scores. Megatron PFLOP/s "
    "always count full recompute and the full attention matrix. Most published speeds are Megatron PFLOP/s."
)
CURVE = ("s/step", "GB", "MFU", "tokens/s/GPU")
"""Columns of the table of a scaling curve that come from ``predicted``. With more columns, the table would be wider
than 80 characters."""


def plan_tables(result: PlanRecord, explained: bool) -> None:
    """Print the table of ranked layouts. Below it, print how many layouts were searched and refused, how certain the
    ranking is, and the costs of training if they are known.

    With ``explained``, also print where a step's time goes, and compare the best layout with the layouts that differ
    from it in one choice.
    """
    request, plan, console = result.request, result.plan, Console()
    step = request.base.step
    title = (
        f"{request.name} on {request.gpus} GPUs of {plan.machine.name}: {int(step.global_batch_size):,} sequences of "
        f"{int(step.seq_length):,} tokens per step"
    )
    columns, same = layout_table(result, console.width)
    print_table(title, list(columns), list(zip(*columns.values(), strict=True)), words=WORDS)
    if same:
        console.print(f"In every row: {', '.join(same)}.")
    if any(first.seconds > second.seconds for first, second in pairwise(plan.ranked)):
        console.print(
            f"Step times within {TIED - 1:.0%} count as equal, and then the layout with the lower P(OOM) comes first."
        )
    if result.own_refused:
        console.print(f"The run file's own layout cannot run here: {result.own_refused}.")
    for sentence in other_program_sentences(result):
        console.print(sentence, markup=False, highlight=False)
    console.print(
        f"Searched {plan.found.evaluated:,} layouts in {plan.found.seconds_taken:.2f} s; {len(plan.found.order):,} are "
        "legal and fit. Rejected: "
        + "; ".join(f"{count:,} ({reason})" for reason, count in plan.found.rejected().items())
        + "."
    )
    for sentence in doubts(result):
        console.print(sentence)
    if command := tune_command(result):
        console.print(command, soft_wrap=True)
    if result.extrapolation:
        console.print(f"Extrapolation: {'; '.join(result.extrapolation)}.")
    if result.costs is not None:
        console.print(costs_sentence(result))
    if explained and result.explanation is not None:
        _explanation(result.explanation, console)


def layout_table(result: PlanRecord, width: float = inf) -> tuple[dict[str, list[str]], list[str]]:
    """Return the table of layouts as two values: its columns by header, and texts for the columns that were removed
    because all rows have the same choice there. There is one row for each layout in ``result.labeled()``.

    Columns are removed only until the table fits into ``width`` characters. First, columns with the same choice in all
    rows are removed. Next, some columns of numbers are removed, but never P(OOM).
    """
    rows = [{"": name, **choices(p.work), **predicted(p, result.interval_factors)} for name, p in result.labeled()]
    columns = {header: [row[header] for row in rows] for header in rows[0]}
    if not any(columns["also"]):
        del columns["also"]
    same = []
    shared = [header for header in CHOICES if header != "also" and len(set(columns.get(header, []))) == 1]
    numbers = ("tokens/s/GPU", "HFU", "90 % interval", f"of {gigabytes(float(result.plan.machine.memory))}", "MFU")
    for place, header in enumerate([*shared, *(header for header in numbers if header in columns)]):
        # The shared choices and the first two columns of ``numbers`` are removed to avoid line breaks. All other
        # columns are removed only if the table is too wide even with line breaks in the columns ``WORDS``.
        if least_width(columns, () if place < len(shared) + 2 else WORDS) <= width:
            break
        cells = columns.pop(header)
        same += [f"{header} {cells[0]}"] if header in shared else []
    return columns, same


def other_program_sentences(result: PlanRecord) -> list[str]:
    """Return sentences about a run of another program (``fourfold plan --from``), or an empty list without such a run.
    They list settings of the program's file. They also compare the predicted step time with the measured step time and
    with the best layouts."""
    other, own = result.request.other, result.own
    if other is None or own is None:
        return []
    measured, predicted, (low, high) = other.row.step_seconds, other.predicted, other.interval or (1.0, 1.0)
    lists = ((title.replace("_", " ").capitalize(), texts) for title, texts in other.lists.items())
    sentences = [f"{title}: {', '.join(texts)}." for title, texts in lists if texts]
    if measured is not None:
        sentences.append(
            f"Measured: {measured:.4g} s per step. Predicted: {predicted:.4g} s ({predicted / measured - 1:+.0%}), and "
            f"with 90 % probability {predicted * low:.3g} to {predicted * high:.3g} s. The table's predictions use "
            "constants that are fitted to the measured step."
        )
        if not predicted * low <= measured <= predicted * high:
            sentences.append("This is outside the interval, so check that the file was read correctly.")
    if own.p_oom > 0.5:
        sentences.append(f"Your layout probably does not fit: P(OOM) is {own.p_oom:.0%}.")
    factor = result.within_error.factor
    for name, best in ((other.row.program, result.theirs), ("fourfold", result.plan.best)):
        if best is None or best.seconds >= own.seconds:
            sentences.append(f"The planner finds no layout in {name} that fits and is faster than yours.")
            continue
        gain = own.seconds / best.seconds
        doubt = f" If this factor is below {factor:.2f}, either layout may be the faster one." if gain < factor else ""
        sentences.append(f"The best layout in {name} is {gain:.2f} times as fast as yours.{doubt}")
    return sentences


def doubts(result: PlanRecord) -> list[str]:
    """Return sentences about how certain the plan is. They say which range the best layout's step time is probably in,
    and how many other layouts may be just as fast."""
    sentences, found = [], result.within_error
    if result.interval is not None:
        low, high = result.interval
        sentences.append(
            f"With a probability of 90 %, a step of the best layout takes {low:.3g} to {high:.3g} s. This range "
            "comes from the planner's errors on published runs. The planner was not fitted to these runs."
        )
    close = f"if two predicted times differ by less than {found.factor - 1:.0%}, either layout may be the faster one"
    if found.count == 1:
        return [*sentences, f"No other layout comes close to the best layout: {close}."]
    these = f"The first {found.ranked} layouts of the table"
    if found.ranked < found.count:
        these = f"The best {found.count:,} layouts"
    return [*sentences, f"{these} cannot be told apart: {close}. Measure the fastest of them:"]


def tune_command(result: PlanRecord) -> str:
    """Return a ``fourfold tune`` command that measures the best layout and the fastest of the layouts that the planner
    cannot tell apart from it. Return an empty text if there is no such layout."""
    found = result.within_error
    space = " ".join(f"--space {limit}" for limit in found.space)
    return f"fourfold tune RUN.toml --nproc {result.request.gpus} {space}" if found.count > 1 else ""


def largest_parts(waterfall: dict[str, Any]) -> dict[str, list[float]]:
    """Return the largest parts of a step's time by name, and the sum of all smaller parts under the name "other".
    There are at most ``PARTS_NAMED`` names. Each name has a list of seconds, with one value per layout."""
    seconds: dict[str, list[float]] = dict(waterfall["seconds"])
    small = sorted(seconds, key=lambda part: (part == "other", -max(seconds[part])))[PARTS_NAMED - 1 :]
    if not small:
        return seconds
    rest = [sum(values) for values in zip(*(seconds[part] for part in small), strict=True)]
    return {part: values for part, values in seconds.items() if part not in small} | {"other": rest}


def slower_by(neighbor: dict[str, Any]) -> str:
    """Return a text about a neighbor: a layout that differs from the best layout in one choice. The text says how much
    slower or faster than the best layout the neighbor is, or why the planner refuses it."""
    slower = neighbor["slower"]
    if slower is None:
        return f"refused: {neighbor['reason']}"
    return "the same" if abs(slower) < 0.0005 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"


def costs_sentence(result: PlanRecord) -> str:
    """Return sentences about what training costs: days, GPU-hours, energy, and price. They also recommend a checkpoint
    interval, if it is known how often the GPUs fail."""
    c = result.costs
    assert c is not None
    parts = [f"{format_number(c.tokens)} tokens take {_amount(c.days)} days, {_amount(c.gpu_hours)} GPU-hours"]
    parts += [f"{_amount(c.kwh)} kWh (GPUs only)"] if c.kwh is not None else []
    parts += [f"a cost of {_amount(c.price)} at the machine file's price"] if c.price is not None else []
    sentence = ", ".join(parts) + "."
    if c.checkpoint_interval_seconds is not None:
        sentence += (
            f" With a failure every {c.mtbf_hours:,.1f} h, checkpoint every {c.checkpoint_interval_seconds / 60:,.0f} "
            f"min (Young/Daly). Then {c.goodput:.1%} of the time is spent on training. The days include the lost time."
        )
    return sentence


def _explanation(explanation: dict[str, Any], console: Console) -> None:
    columns = [COLUMNS[name] for name in explanation["waterfall"]["columns"]]
    parts = largest_parts(explanation["waterfall"])
    parts["all"] = [sum(values) for values in zip(*parts.values(), strict=True)]
    rows = [
        [part, *(f"{value:.3f}" if parts["all"][0] >= 1 else f"{value:.3g}" for value in values)]
        for part, values in parts.items()
    ]
    print_table("Seconds of a step", ["part", *columns], rows)
    for name, text in explanation["layouts"].items():
        console.print(f"{COLUMNS[name]}: {text}")
    rows = [[n["change"], slower_by(n)] for n in explanation["neighbors"]]
    print_table("If you change one choice", ["change", "step time"], rows, words=["step time"])
    console.print(explanation["basin"])


def scaling_table(points: Sequence[ScalingPoint], weak: bool) -> None:
    """Print two tables of a scaling curve, with one row per number of GPUs: the predictions, and the best layouts."""
    rows, layouts = [], []
    for point in points:
        size = f"{point.gpus:,}"
        layouts.append([size, point.why_not if point.best is None else point.best.describe()])
        if point.best is None:
            continue
        numbers, rates = predicted(point.best, None), [f"{pflops:,.1f}" for pflops in point.pflops]
        rows.append([size, *map(numbers.__getitem__, CURVE), f"{point.efficiency:.1%}", *rates])
    header = ["GPUs", *CURVE, "efficiency", "model PFLOP/s", "Megatron PFLOP/s"]
    print_table(f"{'Weak' if weak else 'Strong'} scaling", header, rows)
    print_table("Layouts", ["GPUs", "layout"], layouts, words=["layout"])
    Console().print(FLOP_NOTE)


def validation_tables(result: Validation, with_rows: bool) -> None:
    """Print tables that compare predictions with measured rows. The first table has the errors of predicted step times
    for each source of rows. The next tables say how well the planner ranks the rows of a sweep (they differ only in
    layout), and how far predicted memory is off. With ``with_rows``, the last table has every row."""
    console, record = Console(), result.record(with_rows)
    console.print(f"Constants: {record['constants']}.")
    everything = {"all": {**record, "count": record["rows"]}, **record["by_source"], "others": record["others"],
                  "mixtures": record["mixtures"], "doubtful": record["doubtful"],
                  "all, machine files only": record["machine_file_only"]}  # fmt: skip
    table = [
        [name, str(e["count"]), *(f"{e[f'{kind}_abs_error']:.1%}" for kind in ("median", "mean", "max")),
         f"{e['bias']:+.1%}", "" if e["inside_interval"] is None else f"{e['inside_interval']:.0%}"]
        for name, e in everything.items() if e["count"]
    ]  # fmt: skip
    header = ["source", "rows", "median", "mean", "largest", "bias", "in 90 %"]
    print_table("Step time: absolute relative error", header, table)
    if record["skipped"]:
        reasons = "; ".join(f"{len(ids)} ({reason}: {', '.join(ids)})" for reason, ids in record["skipped"].items())
        console.print(f"Skipped rows: {reasons}.")
    for title, (name, cells) in SCORES.items():
        values = record[name]
        if any(values.values()):
            row = ["" if values[key] is None else text.format(values[key]) for key, text in cells.values()]
            print_table(title, list(cells), [row])
    if with_rows:
        table = [
            [s.row.source, s.row.row_id, _or_blank(s.row.seconds), f"{s.seconds:.4g}", _or_blank(s.row.memory_gb),
             f"{s.memory_gb:.3g}", f"{s.p_oom:.2f}"]
            for s in result.scored
        ]  # fmt: skip
        header = ["source", "row", "measured s", "predicted s", "measured GB", "predicted GB", "P(OOM)"]
        print_table("Rows", header, table, words=["row"])


def _amount(value: float) -> str:
    """Format a number of 100 or more without decimals, and a smaller number with about two significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
