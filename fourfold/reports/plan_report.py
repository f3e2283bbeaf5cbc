"""Plans and scaling curves as HTML pages: one file each, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fourfold.config.run import ParallelConfig
from fourfold.data.files import write_output
from fourfold.planning.search.space import OUT_OF_MEMORY, REASONS
from fourfold.planning.workload import SCHEDULES
from fourfold.reports import html
from fourfold.reports.basic_charts import Series, line_chart, stacked_bars
from fourfold.reports.layout_columns import gigabytes
from fourfold.reports.plan_charts import Dot, scatter, timetable
from fourfold.reports.plan_terminal import costs_sentence, doubts, layout_table

if TYPE_CHECKING:
    from fourfold.planning.plan_record import PlanRecord
    from fourfold.planning.scaling import Point
    from fourfold.planning.search.plan import Prediction

SHOWN = 1500
"""About how many dots of the scatter are an even sample, beside the Pareto front and the fastest."""
SHOWN_STAGES, SHOWN_MICRO_BATCHES = 16, 32
"""Largest timetable; of a larger pipeline it shows the first part."""


def write_plan_report(path: Path, result: PlanRecord) -> None:
    """Write a plan's page: scatter, ranking, waterfall, memory by stage, pipeline, scaling."""
    plan, best = result.plan, result.plan.best
    wide = [_scatter(result)]
    if result.explanation is not None:
        wide.append(_waterfall(result.explanation))
    wide.append(stacked_bars("Memory of the fullest rank of each stage", _stages(best), x_label="GB"))
    if best.work.layout.pp > 1:
        wide.append(_timetable(best))
    if result.curve:
        wide.append(_curve(result.curve))
    in_doubt = [f"<p>{escape(sentence)}</p>" for sentence in doubts(result)]
    sections = [html.facts(_headline(result)), _ranking(result), *in_doubt, html.charts([], wide)]
    if result.costs is not None:
        sections.insert(1, f"<p>{escape(costs_sentence(result))}</p>")
    if result.extrapolation:
        sections.insert(0, html.notice(f"Extrapolation: {'; '.join(result.extrapolation)}."))
    if result.explanation is not None:
        sections += _explanation(result.explanation)
    title = f"{result.request.name} on {result.request.gpus} GPUs of {plan.machine.name}"
    write_output(path, html.page(title, best.describe(), sections))


def write_scaling_report(path: Path, points: Sequence[Point], model: str, machine: str, weak: bool) -> None:
    """Write the page of a scaling curve."""
    kind = "Weak" if weak else "Strong"
    rows = [
        [f"{p.gpus:,}", p.best.describe(), f"{p.best.seconds:.4g}",
         f"{p.best.utilization(p.best.work.model_flops()):.1%}",
         f"{p.best.utilization(p.best.work.hardware_flops()):.1%}", f"{p.efficiency:.1%}", f"{p.pflops:,.0f}",
         "" if p.published_pflops is None else f"{p.published_pflops:,.0f}"]
        if p.best is not None else [f"{p.gpus:,}", p.why_not, *[""] * 6]
        for p in points
    ]  # fmt: skip
    header = ["GPUs", "layout", "s/step", "MFU", "HFU", "efficiency", "PFLOP/s", "published PFLOP/s"]
    sections = [html.charts([], [_curve(points)]), html.table(header, rows, words=True)]
    write_output(path, html.page(f"{model} on {machine}", f"{kind} scaling, replanned at each size", sections))


def _headline(result: PlanRecord) -> dict[str, str | int | float | None]:
    best = result.plan.best
    return {
        "step": f"{best.seconds:.4g} s",
        "tokens/s a GPU": round(best.tokens_per_second / best.gpus),
        "MFU": f"{best.utilization(best.work.model_flops()):.1%}",
        "HFU": f"{best.utilization(best.work.hardware_flops()):.1%}",
        "memory": f"{gigabytes(best.memory_bytes)} GB",
        "P(out of memory)": f"{best.p_oom:.1%}",
        "layouts evaluated": f"{result.plan.found.evaluated:,}",
    }


def _scatter(result: PlanRecord) -> str:
    from fourfold.planning.search.plan import describe_layout

    found, machine = result.plan.found, result.plan.machine

    def text(index: int) -> str:
        name, reason = describe_layout(found.point(index)), found.reason[index]
        size = f"{found.seconds[index]:.4g} s, {gigabytes(found.memory[index])} GB"
        return f"{name}: {size}" + (f"; {REASONS[reason]}" if reason else "")

    legal = np.flatnonzero(np.isfinite(found.seconds))
    near = legal[found.memory[legal] < 2 * machine.memory]
    near = near if len(near) else legal
    by_memory = near[np.lexsort((found.seconds[near], found.memory[near]))]
    front = by_memory[found.seconds[by_memory] <= np.minimum.accumulate(found.seconds[by_memory])]
    sample = near[:: max(1, len(near) // SHOWN)]
    shown = np.unique(np.concatenate([front, found.order[:100], sample]))
    best = found.order[0]
    dots = [
        Dot(
            float(found.memory[i] / 1e9),
            float(found.seconds[i]),
            text(int(i)),
            out=found.reason[i] == OUT_OF_MEMORY,
            best=i == best,
        )
        for i in shown
    ]
    return scatter(
        "Step time in seconds (log scale) against memory of the fullest rank in GB; gray: may not fit, orange: best",
        dots,
        machine.memory / 1e9,
        x_label="GB",
        limit_label=f"{machine.memory / 1e9:.0f} GB",
    )


def _waterfall(explanation: dict[str, Any]) -> str:
    waterfall = explanation["waterfall"]
    names = {"best": "best", "runner_up": "runner-up", "yours": "yours"}
    bars = {
        names[column]: {part: values[i] for part, values in waterfall["seconds"].items()}
        for i, column in enumerate(waterfall["columns"])
    }
    return stacked_bars("What a step is spent on", bars, x_label="seconds")


def _stages(best: Prediction) -> dict[str, dict[str, float]]:
    return {f"stage {place}": {name: value / 1e9 for name, value in stage.items()}
            for place, stage in zip(best.stage_numbers, best.stages, strict=True)}  # fmt: skip


def _timetable(best: Prediction) -> str:
    """Draw the schedule with equal stages; of a long pipeline the first part."""
    from fourfold.parallel.schedule import schedule_ops, timeline

    work = best.work
    whole = (int(work.layout.pp), int(work.micro_batches))
    stages, micro_batches = min(whole[0], SHOWN_STAGES), min(whole[1], SHOWN_MICRO_BATCHES)
    if (stages, micro_batches) != whole and micro_batches > stages:
        micro_batches -= micro_batches % stages  # interleaved schedules need whole rounds
    schedule, chunks = SCHEDULES[int(work.layout.schedule)], max(int(work.layout.interleave), 2)
    grid = ParallelConfig.model_validate({"pp": stages, "schedule": schedule, "stages_per_rank": chunks})
    backward = 2.0 + float(work.layout.recomputing) * (work.layout.recompute == 2)
    spans = timeline(schedule_ops(grid, micro_batches), grid, backward)
    bubble = best.parts["bubble"] / best.seconds
    title = f"Pipeline, seconds: {bubble:.1%} of the step is bubble; drawn with equal stages"
    if (stages, micro_batches) != whole:
        title += f", {stages} of {whole[0]} and {micro_batches} of {whole[1]} micro-batches"
    return timetable(spans, best.micro_batch_seconds / (1 + backward), title)


def _curve(points: Sequence[Point]) -> str:
    fitting = [(float(p.gpus), p.best.tokens_per_second) for p in points if p.best is not None]
    gpus = [size for size, _ in fitting]
    return line_chart(
        "Tokens/s of all GPUs, replanned at each size",
        [
            Series("predicted", gpus, [rate for _, rate in fitting], dots=True),
            Series("linear from the first size", gpus, [fitting[0][1] * size / gpus[0] for size in gpus]),
        ]
        if fitting
        else [],
        x_label="GPUs",
        from_zero=True,
    )


def _ranking(result: PlanRecord) -> str:
    columns, _ = layout_table(result)
    return html.table(list(columns), list(zip(*columns.values(), strict=True)), words=True)


def _explanation(explanation: dict[str, Any]) -> list[str]:
    points = "".join(f"<li>The best {escape(point['sentence'])}.</li>" for point in explanation["break_evens"])
    rows = [
        [n["change"], f"{n['slower']:+.1%}" if n["slower"] is not None else n["reason"]]
        for n in explanation["neighbors"]
    ]
    steps = html.table(["one step away", "slower by"], rows, words=True)
    sections = [
        f"<h2>Break-evens</h2><ul>{points}</ul>" if points else "",
        f"<h2>Neighbors</h2><p>{escape(explanation['basin'])}</p>{steps}",
    ]
    if more := explanation["next_doubling"]:
        sections.append(
            f"<p>{more['gpus']:,} GPUs with the same batch: {more['step_seconds']:.4g} s a step, "
            f"{more['speedup']:.2f} times as fast; {escape(more['layout'])}.</p>"
        )
    return sections
