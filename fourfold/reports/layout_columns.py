"""Define the columns that describe a plan's layouts, both in the terminal's table and in the page's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.planning.search.plan import GRID
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES, Workload

if TYPE_CHECKING:
    from fourfold.planning.machines.machine import Machine
    from fourfold.planning.search.plan import Prediction

CHOICES = (*GRID, "ep", "zero", "recompute", "micro batch", "also")
"""Headers of the columns for a layout's choices. The column ``also`` holds rare choices."""
SHORT = {"Interleaved1F1B": "interleaved", "InterleavedZeroBubble": "zero bubble", "ZBVZeroBubble": "ZBV"}
"""Short names for schedules whose full names would make the column too wide."""


def choices(work: Workload) -> dict[str, str]:
    """Return the texts that tables show for a layout's choices, by the headers in ``CHOICES``. Only MoE models have
    ``ep``."""
    layout = work.layout
    cells = {axis: str(int(getattr(layout, axis))) for axis in (*GRID, *(["ep"] if work.model.num_experts else []))}
    blocks = f", 1 of {int(layout.recompute_every)}" if layout.recompute_every > 1 else ""
    cells["zero"] = str(int(layout.zero))
    cells["recompute"] = RECOMPUTE[int(layout.recompute)] + blocks + ", offload" * bool(layout.offload)
    cells["micro batch"] = str(int(layout.micro_batch_size))
    more = [schedule(work)] if layout.pp > 1 and layout.schedule > 0 else []
    more += [CP_METHODS[int(layout.cp_method)]] if layout.cp > 1 and layout.cp_method > 0 else []
    more += [f"{int(work.active_parts)} parts"] if work.active_parts > 1 else []
    return {**cells, "also": ", ".join(more)}


def schedule(work: Workload) -> str:
    """Return the schedule of a pipeline with its number of stages per rank. The text is empty if there is no
    pipeline."""
    layout = work.layout
    if layout.pp == 1:
        return ""
    name = SCHEDULES[int(layout.schedule)]
    return SHORT.get(name, name) + (f" ×{int(layout.stages_per_rank)}" if layout.stages_per_rank > 1 else "")


def predicted(p: Prediction, factors: Sequence[float] | None) -> dict[str, str]:
    """Return the figures of a prediction. With a probability of 90 %, the measured time is between the predicted time
    times the first and times the second of the ``factors``."""
    mfu = p.utilization(p.work.model_flops())
    return {
        **figures(p.machine, p.seconds, p.memory_bytes, p.p_oom, mfu, factors),
        "HFU": f"{p.utilization(p.work.hardware_flops()):.1%}",
        "tokens/s/GPU": f"{p.tokens_per_second / p.gpus:,.0f}",
    }


def figures(
    machine: Machine, seconds: float, memory: float, p_oom: float, mfu: float, factors: Sequence[float] | None
) -> dict[str, str]:
    """Return the figures of a layout that every table shows.

    Args:
        machine: The machine.
        seconds: Number of seconds per step.
        memory: Peak bytes of the rank that needs the most memory.
        p_oom: Probability of running out of memory.
        mfu: Model FLOPs utilization.
        factors: See ``predicted``.
    """
    interval = {} if factors is None else {"90 % interval": "–".join(_digits(seconds * f, 3) for f in factors)}
    return {
        "s/step": _digits(seconds, 4),
        **interval,
        "MFU": f"{mfu:.1%}",
        "GB": gigabytes(memory),
        f"of {gigabytes(float(machine.memory))}": f"{memory / machine.memory:.0%}",
        "P(OOM)": f"{p_oom:.1%}",
    }


def gigabytes(size: float) -> str:
    """Format a number of bytes in GB with three significant digits."""
    return _digits(size / 1e9, 3) if size < 999.5e9 else f"{size / 1e9:,.0f}"


def _digits(value: float, count: int) -> str:
    return f"{value:,.0f}" if value >= 10**count else f"{value:#.{count}g}".removesuffix(".")
