"""Define the columns that describe the layouts of a plan, for the terminal's table and the table of the HTML page."""

from collections.abc import Sequence

from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.plan import GRID, Prediction
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES, Workload

CHOICES = (*GRID, "ep", "zero", "recompute", "micro batch", "also")
"""Headers of the columns that describe a layout. The column "also" has the choices that few layouts make."""
SHORT = {"Interleaved1F1B": "interleaved", "InterleavedZeroBubble": "zero bubble", "ZBVZeroBubble": "ZBV"}
"""Short names of schedules whose full names would make the column too wide."""


def choices(work: Workload) -> dict[str, str]:
    """Return the table cells that describe a layout. The keys are headers of ``CHOICES``. Only MoE models have the
    header "ep"."""
    layout = work.layout
    cells = {axis: str(int(getattr(layout, axis))) for axis in (*GRID, *(["ep"] if work.model.num_experts else []))}
    blocks = f", 1 of {int(layout.recompute_every)}" if layout.recompute_every > 1 else ""
    cells["zero"] = str(int(layout.zero))
    cells["recompute"] = RECOMPUTE[int(layout.recompute)] + blocks + ", offload" * bool(layout.offload)
    cells["micro batch"] = str(int(layout.micro_batch_size))
    more = [schedule(work)] if layout.pp > 1 and (layout.schedule > 0 or layout.stages_per_rank > 1) else []
    more += [CP_METHODS[int(layout.cp_method)]] if layout.cp > 1 and layout.cp_method > 0 else []
    more += [f"{int(work.active_parts)} parts"] if work.active_parts > 1 else []
    return {**cells, "also": ", ".join(more)}


def schedule(work: Workload) -> str:
    """Return a text that names the pipeline schedule of a layout, and the number of stages per rank if it is above 1.
    Return an empty text for a layout without a pipeline."""
    layout = work.layout
    if layout.pp == 1:
        return ""
    name = SCHEDULES[int(layout.schedule)]
    return SHORT.get(name, name) + (f" ×{int(layout.stages_per_rank)}" if layout.stages_per_rank > 1 else "")


def predicted(p: Prediction, factors: Sequence[float] | None) -> dict[str, str]:
    """Return the table cells of a prediction, by header.

    With ``factors``, one cell shows an interval that contains the measured step time with a probability of 90 %. Its
    ends are the predicted step time multiplied by the first factor, and multiplied by the second factor.
    """
    mfu = p.utilization(p.work.model_flops())
    return {
        **figures(p.machine, p.seconds, p.memory_bytes, p.p_oom, mfu, factors),
        "HFU": f"{p.utilization(p.work.hardware_flops()):.1%}",
        "tokens/s/GPU": f"{p.tokens_per_second / p.gpus:,.0f}",
    }


def figures(
    machine: Machine, seconds: float, memory: float, p_oom: float, mfu: float, factors: Sequence[float] | None
) -> dict[str, str]:
    """Return the table cells that all tables of predictions have, by header.

    Args:
        machine: The machine, whose memory is compared with the layout's memory.
        seconds: Seconds per step.
        memory: Peak memory in bytes of the rank that needs the most memory.
        p_oom: Probability of running out of memory.
        mfu: Model FLOPs utilization, as a fraction.
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
    """Format a number of bytes in GB, with at least three significant digits."""
    return _digits(size / 1e9, 3) if size < 999.5e9 else f"{size / 1e9:,.0f}"


def _digits(value: float, count: int) -> str:
    return f"{value:,.0f}" if value >= 10**count else f"{value:#.{count}g}".removesuffix(".")
