"""Draw what each rank of a pipeline does over time, and print the table of docs/pipeline.md: python
docs/figures/schedules.py"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import make
from make import INK, LINE, PAPER, SOFT, Drawing

from fourfold.config.run import ParallelConfig, PipelineSchedule
from fourfold.config.stages import stages_per_rank
from fourfold.parallel.pipeline.schedule import Op, schedule_ops

# Import fourfold from this repository.
sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.pipeline_times import Span, bubble, timeline

PP, DRAWN = 4, 8
COLORS = {
    "F": ("forward", "#0072b2", "#8cc4e6"),
    "B": ("backward", "#b84a00", "#f0b48c"),
    "I": ("input gradients", "#a87400", "#f5d58a"),
    "W": ("weight gradients", "#00714f", "#8fd3bd"),
}
"""For each kind of operation: its name, a dark color for operations of a rank's first stage, and a light color for
operations of its later stages. The colors come from the palette of Okabe and Ito, which color-blind readers can tell
apart. White text is readable on the dark colors, and dark text is readable on the light colors."""

LEFT, TOP, ROW, GAP, UNIT = 206, 70, 17, 26, 28


def schedules() -> None:
    """Draw every schedule on one time axis, with pp = 4 and 8 micro-batches."""
    names = get_args(PipelineSchedule)
    spans = {name: spans_of(name, DRAWN) for name in names}
    longest = max(rank[-1].end for of_all in spans.values() for rank in of_all)
    height = TOP + len(names) * (PP * ROW + GAP) + 34
    d = Drawing(round(LEFT + longest * UNIT + 30), height, f"Schedules of {PP} ranks and {DRAWN} micro-batches")
    x = float(LEFT)
    for kind, (name, dark, light) in COLORS.items():
        d.rect(x, 20, 18, 18, dark)
        d.rect(x + 18, 20, 18, 18, light)
        d.text(x + 42, 34, f"{kind}: {name}", 13, anchor="start")
        x += 178
    d.text(x, 34, "light: later stages of the rank", 13, SOFT, "start")
    bottom = TOP + len(names) * (PP * ROW + GAP) - GAP + 6
    for unit in range(0, int(longest) + 1, 3):
        d.line(LEFT + unit * UNIT, TOP - 8, LEFT + unit * UNIT, bottom, "#e4e7eb")
        d.text(LEFT + unit * UNIT, bottom + 16, str(unit), 12, SOFT)
    d.text(
        LEFT + longest * UNIT / 2, bottom + 36, "time, in forwards of a rank's layers; a backward takes 2", 12.5, SOFT
    )
    for i, name in enumerate(names):
        chart(d, name, spans[name], TOP + i * (PP * ROW + GAP))
    d.save("schedules.svg")


def chart(d: Drawing, name: str, spans: Sequence[Sequence[Span]], top: float) -> None:
    """Draw one schedule: a row for each rank, with one box per operation that shows the number of the micro-batch."""
    d.text(LEFT - 42, top + ROW * 1.7, name, 12.5, anchor="end", bold=True)
    d.text(LEFT - 42, top + ROW * 2.8, f"idle {100 * bubble(spans):.1f} %", 12.5, SOFT, "end")
    end = max(rank[-1].end for rank in spans)
    boxes: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for rank, of_rank in enumerate(spans):
        y = top + rank * ROW
        d.text(LEFT - 6, y + 12.5, f"rank {rank}", 10.5, SOFT, "end")
        d.rect(LEFT, y, end * UNIT, ROW - 2, "#eef1f4", "none")
        for op, begin, stop in of_rank:
            _, dark, light = COLORS[op.kind]
            first = op.stage < PP
            box, number = boxes.setdefault((dark, PAPER) if first else (light, INK), ([], []))
            left, width = LEFT + begin * UNIT, (stop - begin) * UNIT - 1
            box.append(f"M{left:g} {y:g}h{width:g}v{ROW - 2}h{-width:g}z")
            number.append(f'<text x="{left + width / 2:g}" y="{y + 12:g}">{op.micro_batch}</text>')
    for (fill, ink), (box, number) in boxes.items():  # One path and one group per color keep the file small.
        d.parts.append(f'<path fill="{fill}" d="{"".join(box)}"/>')
        d.parts.append(f'<g font-size="10.5" text-anchor="middle" fill="{ink}">{"".join(number)}</g>')
    d.line(LEFT + end * UNIT, top - 3, LEFT + end * UNIT, top + PP * ROW, LINE)


def table() -> str:
    """Return a Markdown table: for each schedule, how long ranks wait, and for how many micro-batches they store
    activations."""
    rows = [f"| schedule | stages per rank | idle, m = 4 | idle, m = 16 | stored by ranks 0 to {PP - 1}, m = 16 |"]
    rows.append("|---|---|---|---|---|")
    for name in get_args(PipelineSchedule):
        grid = ParallelConfig(pp=PP, schedule=name)
        chunks = stages_per_rank(grid)
        idle = [
            "refused" if name == "DualPipeV" and m < 2 * PP else f"{100 * bubble(spans_of(name, m)):.1f} %"
            for m in (4, 16)
        ]
        kept = ", ".join(f"{held(ops) / chunks:g}" for ops in schedule_ops(grid, 16))
        rows.append(f"| `{name}` | {chunks} | {idle[0]} | {idle[1]} | {kept} |")
    return "\n".join(rows) + "\n"


def spans_of(schedule: PipelineSchedule, micro_batches: int) -> list[list[Span]]:
    grid = ParallelConfig(pp=PP, schedule=schedule)
    return timeline(schedule_ops(grid, micro_batches), grid)


def held(ops: Sequence[Op]) -> int:
    """Return the largest number of micro-batches whose activations a rank stores at the same time. A micro-batch needs
    its activations from its forward pass to its backward pass."""
    most = now = 0
    for op in ops:
        now += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
        most = max(most, now)
    return most


if __name__ == "__main__":
    schedules()
    print(table(), end="")
    print(f"drawn in {make.HERE}")
