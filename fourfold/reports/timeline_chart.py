"""Draw the timeline of a predicted step: every forward and backward of each pp rank, and the work at the end of the
step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fourfold.config.run import ParallelConfig
from fourfold.planning.workload import SCHEDULES
from fourfold.reports.chart import chart

if TYPE_CHECKING:
    from fourfold.planning.search.plan import Prediction

STAGES, OPERATIONS = 16, 4000
"""Largest numbers of ranks and operations in a timeline. A larger pipeline is shown only in part."""
KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
REST = "rest of the step"


class Bar(NamedTuple):
    """An operation: its pp rank, its seconds, and the micro-batch and stage that it runs for (-1: for all)."""

    rank: int
    begin: float
    end: float
    kind: str
    micro_batch: int
    stage: int


def step_timeline(best: Prediction) -> str:
    """Draw the step with equal stages.

    The chart can zoom and has a button that saves it for Perfetto and chrome://tracing.
    """
    bars, cut = timeline_bars(best)
    ranks = 1 + max(bar.rank for bar in bars)
    kinds = [kind for kind in (*KINDS.values(), REST) if any(bar.kind == kind for bar in bars)]
    series = [
        {"type": "custom", "name": kind, "renderItem": "@bar", "encode": {"x": [1, 2], "y": 0}, "clip": True,
         "itemStyle": {"color": "--s6" if kind == REST else f"--s{number}"},
         "data": [[bar.rank, bar.begin, bar.end, bar.micro_batch, bar.stage, (bar.stage // ranks) % 2]
                  for bar in bars if bar.kind == kind]}
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    option: dict[str, Any] = {
        "xAxis": {"type": "value", "name": "seconds", "min": 0, "max": max(bar.end for bar in bars)},
        "yAxis": {"type": "category", "data": [f"rank {rank}" for rank in range(ranks)], "inverse": True,
                  "axisTick": {"show": False}},
        "grid": {"top": 6},
        "tooltip": {"trigger": "item", "formatter": "@bar"},
        "series": series,
    }  # fmt: skip
    bubble = best.parts["bubble"] / best.seconds
    title = f"Timeline of a step: {bubble:.1%} of it is bubble" if best.work.layout.pp > 1 else "Timeline of a step"
    figure = chart(title + cut, option, height=70 + 22 * ranks, zoom="x")
    button = '<button type="button" class="trace">Save as a trace for ui.perfetto.dev or chrome://tracing</button>'
    return f"{figure}<p>{button}</p>"


def timeline_bars(best: Prediction) -> tuple[list[Bar], str]:
    """Return the operations of the step, and a note on what is left out.

    Every stage takes as long as the average stage. Work that does not run once per micro-batch (the logits, the end of
    the gradient sum, the optimizer) is one operation at the end, so the whole step ends when the prediction does.
    """
    work = best.work
    pp, count, chunks = int(work.layout.pp), int(work.micro_batches), max(int(work.layout.interleave), 1)
    again = float(work.layout.recomputing) * (work.layout.recompute == 2)
    backward = 2.0 + again
    forward = best.micro_batch_seconds / (1 + backward)
    stages = min(pp, STAGES)
    shown = min(count, max(OPERATIONS // (2 * stages * chunks), 1))
    if pp > 1 and shown < count:
        shown = max(shown - shown % stages, min(stages, count))  # Interleaved schedules need whole rounds.
    if pp == 1:
        bars = []
        for number in range(shown):
            begin = number * best.micro_batch_seconds
            middle, end = begin + forward, begin + best.micro_batch_seconds
            bars += [Bar(0, begin, middle, "forward", number, 0), Bar(0, middle, end, "backward", number, 0)]
    else:
        bars = _pipeline_bars(best, stages, shown, backward, forward)
    cut = ""
    if (stages, shown) != (pp, count):
        cut = f"; {stages} of {pp} ranks of pp, {shown} of {count} micro-batches" if pp > 1 else (
            f"; {shown} of {count} micro-batches"
        )  # fmt: skip
    else:
        last = max(bar.end for bar in bars)
        bars += [Bar(rank, last, best.seconds, REST, -1, -1) for rank in range(stages) if best.seconds > last]
    return bars, cut


def _pipeline_bars(best: Prediction, stages: int, micro_batches: int, backward: float, forward: float) -> list[Bar]:
    from fourfold.parallel.pipeline.schedule import schedule_ops, timeline

    layout = best.work.layout
    schedule = SCHEDULES[int(layout.schedule)]
    grid = ParallelConfig.model_validate(
        {"pp": stages, "schedule": schedule, "stages_per_rank": max(int(layout.interleave), 2)}
    )
    spans = timeline(schedule_ops(grid, micro_batches), grid, backward)
    return [
        Bar(rank, span.begin * forward, span.end * forward, KINDS[span.op.kind], span.op.micro_batch, span.op.stage)
        for rank, each in enumerate(spans)
        for span in each
    ]
