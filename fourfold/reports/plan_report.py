"""Write a plan as an HTML page, one self-contained file."""

from html import escape
from pathlib import Path
from typing import Any

from fourfold.data.atomic_files import write_output
from fourfold.planning.plan_record import PlanRecord
from fourfold.planning.search.plan import Prediction
from fourfold.reports import html
from fourfold.reports.basic_charts import stacked_bars
from fourfold.reports.layout_columns import choices, figures, predicted
from fourfold.reports.plan_terminal import (
    COLUMNS,
    costs_sentence,
    doubts,
    largest_parts,
    other_program_sentences,
    slower_by,
    tune_command,
)

FASTEST = 200
"""Largest number of layouts in the page's table."""


def write_plan_report(path: Path, result: PlanRecord) -> None:
    """Write the HTML page of a plan. It shows the layouts, and the memory by pipeline stage. If the plan has an
    explanation, the page also shows where a step's time goes, and layouts that differ from the best layout in one
    choice."""
    plan, best = result.plan, result.plan.best
    wide = []
    if result.explanation is not None:
        wide.append(_waterfall(result.explanation, result.is_own_drawn))
    wide.append(stacked_bars("Memory of the fullest rank of each stage", _stages(best), x_label="GB"))
    in_doubt = [f"<p>{escape(sentence)}</p>" for sentence in doubts(result)]
    if command := tune_command(result):
        in_doubt.append(html.code(command))
    headline = {**predicted(best, None), "layouts evaluated": f"{plan.found.evaluated:,}"}
    sections = [html.facts(headline), *_layouts(result), *in_doubt, html.charts([], wide)]
    if result.own is not None and not result.is_own_drawn:
        own = f"{result.own_label}: {result.own.seconds:.4g} s per step, too long for the charts"
        sections.insert(-1, f"<p>{escape(own)}. It is in the table of layouts.</p>")
    if result.costs is not None:
        sections.insert(1, f"<p>{escape(costs_sentence(result))}</p>")
    if result.extrapolation:
        sections.insert(0, html.notice(f"Extrapolation: {'; '.join(result.extrapolation)}."))
    if result.explanation is not None:
        sections.append(_neighbors(result.explanation))
    title = f"{result.request.name} on {result.request.gpus} GPUs of {plan.machine.name}"
    write_output(path, html.page(title, best.describe(), sections, has_search=True))


def _layouts(result: PlanRecord) -> list[str]:
    found, machine = result.plan.found, result.plan.machine
    rows = []
    for rank, index in enumerate(found.order[:FASTEST], start=1):
        work, seconds = found.point(index), float(found.seconds[index])
        per_gpu = seconds * work.layout.gpus
        mfu = float(work.model_flops() / (per_gpu * machine.peak))
        memory, p_oom = float(found.memory[index]), float(found.p_oom[index])
        numbers = figures(machine, seconds, memory, p_oom, mfu, result.interval_factors)
        numbers["tokens/s/GPU"] = f"{work.tokens_per_step / per_gpu:,.0f}"
        rows.append({"": f"{rank}", **choices(work), **numbers})
    for label, own in result.labeled()[len(result.plan.ranked) :]:
        cells = {"": label, **choices(own.work), **predicted(own, result.interval_factors)}
        rows.append({name: cells[name] for name in rows[0]})
    first, *others = [name for name in rows[0] if any(row[name] for row in rows)]
    header = [first, "s/step", *(name for name in others if name != "s/step")]
    text = (
        f"The {min(FASTEST, len(found.order))} fastest of {len(found.order):,} layouts that fit. Click a header to "
        "sort. To filter, write 8, or 1,2, or 1-4, or <=4, or a part of a word into the field below the header."
    )
    table = html.search_table(header, [[row[name] for name in header] for row in rows])
    refused = html.table(["refused because", "layouts"], [[name, f"{n:,}"] for name, n in found.rejected().items()])
    of_other = [f"<p>{escape(sentence)}</p>" for sentence in other_program_sentences(result)]
    return [f"<h2>Layouts</h2><p>{escape(text)}</p>", table, *of_other, refused]


def _waterfall(explanation: dict[str, Any], with_own: bool) -> str:
    waterfall = explanation["waterfall"]
    seconds = largest_parts(waterfall)
    bars = {
        COLUMNS[column]: {part: values[i] for part, values in seconds.items()}
        for i, column in enumerate(waterfall["columns"])
        if with_own or column != "yours"
    }
    return stacked_bars("Where a step's time goes", bars, x_label="seconds")


def _stages(best: Prediction) -> dict[str, dict[str, float]]:
    return {f"stage {place}": {name: value / 1e9 for name, value in stage.items()}
            for place, stage in zip(best.stage_numbers, best.stages, strict=True)}  # fmt: skip


def _neighbors(explanation: dict[str, Any]) -> str:
    rows = [[n["change"], slower_by(n)] for n in explanation["neighbors"]]
    steps = html.table(["if you change one choice", "step time"], rows, words=True)
    return f"<h2>Neighbors</h2><p>{escape(explanation['basin'])}</p>{steps}"
