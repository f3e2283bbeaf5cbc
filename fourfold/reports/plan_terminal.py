"""Tables of plans for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fourfold.planning.answer import Answer
    from fourfold.planning.plan import Prediction
    from fourfold.planning.scaling import Point
    from fourfold.planning.validation.report import Validation


def plan_tables(told: Answer, explained: bool) -> None:
    """Ranked layouts; with ``explained`` what the best spends its time on, and what would change the order."""
    plan, console = told.plan, Console()
    title = (
        f"{told.asked.name} on {told.asked.gpus} GPUs of {plan.machine.name}: {int(plan.best.work.batch):,} sequences "
        f"of {int(plan.best.work.seq):,} tokens a step"
    )
    table = _table(title, ["layout", "s/step", "GB", "P(OOM)", "MFU", "HFU", "tokens/s/GPU"])
    rows = [("", prediction) for prediction in plan.ranked]
    if told.own is not None:
        rows.append(("yours: ", told.own))
    for name, p in rows:
        table.add_row(name + p.describe(), *_numbers(p))
    console.print(table)
    console.print(
        f"{plan.found.evaluated:,} layouts in {plan.found.seconds_taken:.2f} s; {len(plan.found.order):,} are legal "
        "and fit. Rejected: "
        + "; ".join(f"{count:,} {reason}" for reason, count in plan.found.rejected().items())
        + "."
    )
    if told.extrapolation:
        console.print(f"Extrapolation: {'; '.join(told.extrapolation)}.")
    if told.costs is not None:
        console.print(costs_sentence(told))
    if explained and told.explanation is not None:
        _explanation(told.explanation, console)


def costs_sentence(told: Answer) -> str:
    """Days, GPU-hours, energy, money, and the checkpoint interval."""
    c = told.costs
    assert c is not None
    parts = [f"{c.tokens:.3g} tokens take {c.days:,.1f} days, {c.gpu_hours:,.0f} GPU-hours"]
    parts += [f"{c.kwh:,.0f} kWh (GPUs alone)"] if c.kwh is not None else []
    parts += [f"{c.price:,.0f} in money"] if c.price is not None else []
    sentence = ", ".join(parts) + "."
    if c.checkpoint_interval_seconds is not None:
        sentence += (
            f" A failure every {c.mtbf_hours:,.1f} h: checkpoint every {c.checkpoint_interval_seconds / 60:,.0f} min "
            f"(Young/Daly); {c.goodput:.1%} of the time is then progress, and the days count it."
        )
    return sentence


def _explanation(told: dict[str, Any], console: Console) -> None:
    columns = told["waterfall"]["columns"]
    table = _table("Seconds of a step", ["part", *columns])
    for part, values in told["waterfall"]["seconds"].items():
        table.add_row(part, *(f"{value:.4g}" for value in values))
    totals = [sum(values) for values in zip(*told["waterfall"]["seconds"].values(), strict=True)]
    table.add_row("all", *(f"{total:.4g}" for total in totals))
    console.print(table)
    for name, text in told["layouts"].items():
        console.print(f"{name.replace('_', '-')}: {text}")
    for point in told["break_evens"]:
        console.print(f"The best {point['sentence']}.")
    table = _table("One step away", ["change", "slower by"])
    for neighbour in told["neighbours"]:
        slower = neighbour["slower"]
        table.add_row(neighbour["change"], f"{slower:+.1%}" if slower is not None else neighbour["reason"])
    console.print(table)
    console.print(told["basin"])
    if more := told["next_doubling"]:
        console.print(
            f"{more['gpus']} GPUs with the same batch: {more['step_seconds']:.4g} s a step, {more['speedup']:.2f} "
            f"times as fast ({more['efficiency']:.0%} of twice): {more['layout']}."
        )


def scaling_table(points: Sequence[Point], weak: bool) -> None:
    """A row for each size."""
    table = _table(f"{'Weak' if weak else 'Strong'} scaling", [
        "GPUs", "layout", "s/step", "GB", "P(OOM)", "MFU", "HFU", "tokens/s/GPU", "efficiency", "PFLOP/s", "published",
    ])  # fmt: skip
    for point in points:
        if point.best is None:
            table.add_row(f"{point.gpus:,}", point.why_not)
            continue
        record = point.record()
        published = "" if point.published_pflops is None else f"{point.published_pflops:,.1f}"
        table.add_row(f"{point.gpus:,}", point.best.describe(), *_numbers(point.best), f"{point.efficiency:.1%}",
                      f"{record['megatron_pflops']:,.1f}", published)  # fmt: skip
    console = Console()
    console.print(table)
    console.print("PFLOP/s count recompute and the whole square of the attention, as the published figures do.")


def validation_tables(result: Validation, rows: bool) -> None:
    """Errors by source, or published figures beside predictions."""
    console, record = Console(), result.record(rows)
    console.print(f"Constants: {record['constants']}.")
    if "figures" in record:
        table = _table(
            "Published figures (PFLOP/s)", ["model", "machine", "GPUs", "published", "as run", "error", "layout"]
        )
        for f in record["figures"]:
            table.add_row(f["model"], f["machine"], f"{f['gpus']:,}", f"{f['published_pflops']:,.1f}",
                          f"{f['as_run_pflops']:,.1f}", f"{f['error']:+.0%}", f["as_run"])  # fmt: skip
        console.print(table)
        table = _table("AxoNN's weak scaling", ["GPUs", "model", "efficiency", "published", "layout"])
        for r in record["weak_scaling"]:
            published = "" if r["published"] is None else f"{r['published']:.1%}"
            table.add_row(f"{r['gpus']:,}", r["model"], f"{r['efficiency']:.1%}", published, r["layout"])
        console.print(table)
        return
    table = _table("Step time: absolute relative error", ["source", "rows", "median", "mean", "largest", "bias"])
    everything = {"all": {**record, "count": record["rows"]}, **record["by_source"], "others": record["others"],
                  "all, machine files only": record["machine_file_only"]}  # fmt: skip
    for name, e in everything.items():
        if e["count"]:
            numbers = (e["median_abs_error"], e["mean_abs_error"], e["max_abs_error"])
            table.add_row(name, str(e["count"]), *(f"{v:.1%}" for v in numbers), f"{e['bias']:+.1%}")
    console.print(table)
    console.print("; ".join(f"{count} skipped: {reason}" for reason, count in record["skipped"].items()))
    for name in ("sweeps", "memory"):
        values = {k: v for k, v in record[name].items() if v is not None}
        console.print(f"{name}: " + ", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in values.items()))
    if rows:
        table = _table("Rows", ["source", "row", "measured s", "predicted s", "measured GB", "predicted GB", "P(OOM)"])
        for s in result.scored:
            table.add_row(s.row.source, s.row.row_id, _or_blank(s.row.seconds), f"{s.seconds:.4g}",
                          _or_blank(s.row.memory_gb), f"{s.memory_gb:.3g}", f"{s.p_oom:.2f}")  # fmt: skip
        console.print(table)


def _or_blank(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _numbers(p: Prediction) -> list[str]:
    work = p.work
    return [f"{p.seconds:.4g}", f"{p.memory_bytes / 1e9:.1f}", f"{p.p_oom:.1%}",
            f"{p.utilisation(work.model_flops()):.1%}", f"{p.utilisation(work.hardware_flops()):.1%}",
            f"{p.tokens_per_second / p.work.gpus:,.0f}"]  # fmt: skip


LEFT = ("layout", "model", "machine", "row", "slower by")


def _table(title: str, columns: Sequence[str]) -> Table:
    """Words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in LEFT else "right", overflow="fold")
    return table
