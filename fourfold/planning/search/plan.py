"""Plan a model on a machine: find the best layouts and predict each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.errors import UserError
from fourfold.planning.array_fields import Number
from fourfold.planning.cost.memory import peak_memory, stage_memory
from fourfold.planning.cost.out_of_memory import p_out_of_memory
from fourfold.planning.cost.step import step_parts
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.search.fastest import Found, search
from fourfold.planning.search.space import AXES, SearchLimits
from fourfold.planning.workload import CP_METHODS, RECOMPUTE, SCHEDULES, Workload

GRID = ("pp", "dp", "cp", "z", "y", "x")
"""Axes of the grid in the order in which a layout lists them."""


@dataclass(frozen=True)
class Prediction:
    """One layout with its predicted step time and memory."""

    work: Workload
    """The layout, with its model, step, and framework."""
    parts: dict[str, float]
    """Seconds of a step by part (``cost.step.PARTS``)."""
    memory_bytes: float
    """Peak bytes on the rank that needs the most memory."""
    p_oom: float
    """Probability of running out of memory."""
    stages: list[dict[str, float]]
    """Peak bytes by category (``cost.memory.CATEGORIES``), for each of the pipeline ranks in ``stage_numbers``."""
    machine: Machine
    """The machine that the prediction is for."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return int(self.work.layout.gpus)

    @property
    def stage_numbers(self) -> list[int]:
        """Return the pipeline ranks that ``stages`` describes."""
        return _stages_shown(int(self.work.layout.pp))

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput of all GPUs together, in tokens per second."""
        return float(self.work.step.global_batch_size * self.work.step.seq_length / self.seconds)

    def utilization(self, flops: Number) -> float:
        """Return the fraction of the GPUs' bf16 peak FLOP/s that a step reaches. The bf16 peak is also used for other
        precisions.

        Args:
            flops: FLOPs of one step on all GPUs. Model FLOPs give the MFU.
        """
        return float(flops / (self.seconds * self.gpus * self.machine.peak))

    def pflops(self, flops: Number) -> float:
        """Return the PFLOP/s of all GPUs together.

        Args:
            flops: FLOPs of one step on all GPUs.
        """
        return float(flops / self.seconds / 1e15)

    def describe(self) -> str:
        """Return the layout in one line, without axes of size 1."""
        return describe_layout(self.work)

    def record(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        work, layout = self.work, self.work.layout
        schedule, stages_per_rank = SCHEDULES[int(layout.schedule)], int(layout.stages_per_rank)
        cp_method = CP_METHODS[int(layout.cp_method)]
        return {
            "parallel": {
                **{axis: int(getattr(layout, axis)) for axis in AXES},
                **({"ep": int(layout.ep)} if work.model.num_experts else {}),
                "zero": int(layout.zero),
                **({"schedule": schedule} if layout.pp > 1 else {}),
                **({"stages_per_rank": stages_per_rank} if stages_per_rank > 1 else {}),
                **({"cp_method": cp_method} if layout.cp > 1 and layout.cp_method > 0 else {}),
            },
            "micro_batch_size": int(layout.micro_batch_size), "batch_parts": int(work.active_parts),
            "gradient_accumulation_steps": int(work.micro_batches),
            "activation_checkpoint": RECOMPUTE[int(layout.recompute)],
            "activation_checkpoint_every": int(layout.recompute_every),
            "activation_checkpoint_offload": bool(layout.offload),
            "step_seconds": self.seconds, "memory_bytes": int(self.memory_bytes), "p_out_of_memory": self.p_oom,
            "mfu": self.utilization(work.model_flops()), "hfu": self.utilization(work.hardware_flops()),
            "tokens_per_second_per_gpu": self.tokens_per_second / self.gpus, "parts": self.parts,
            "stages": [{"stage": n, **stage} for n, stage in zip(self.stage_numbers, self.stages, strict=True)],
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The fastest layouts that a search has found."""

    best: Prediction
    ranked: list[Prediction]
    """The fastest layouts, best first."""
    found: Found
    """All points of the search, including illegal layouts, with their scores."""
    machine: Machine
    constants: Constants
    gpus: int

    def record(self) -> dict[str, Any]:
        return {
            "best": self.best.record(),
            "ranked": [prediction.record() for prediction in self.ranked],
            "evaluated": self.found.evaluated,
            "seconds": self.found.seconds_taken,
            "rejected": self.found.rejected(),
        }


def describe_layout(work: Workload) -> str:
    """Describe a layout in one line, without axes of size 1."""
    layout = work.layout
    axes = [f"{axis} {int(size)}" for axis in (*GRID, "ep") if (size := getattr(layout, axis)) > 1] or ["one GPU"]
    more = [f"zero {int(layout.zero)}"] if layout.zero > 0 else []
    more += [CP_METHODS[int(layout.cp_method)]] if layout.cp > 1 and layout.cp_method > 0 else []
    more += [SCHEDULES[int(layout.schedule)]] if layout.pp > 1 and layout.schedule > 0 else []
    more += [f"stages_per_rank {int(layout.stages_per_rank)}"] if layout.stages_per_rank > 1 else []
    if layout.recompute > 0:
        more.append(f"{RECOMPUTE[int(layout.recompute)]} recompute{of_blocks(int(layout.recompute_every))}")
    more += ["offload"] if layout.offload else []
    parts = f" in {int(work.active_parts)} parts" if work.active_parts > 1 else ""
    return ", ".join([" × ".join(axes), *more, f"micro-batch {int(layout.micro_batch_size)}{parts}"])


def of_blocks(every: int) -> str:
    """Return a suffix that says which blocks recompute. It is empty if all blocks recompute."""
    return {1: "", 2: " of every second block"}.get(every, f" of every {every}th block")


def predict(work: Workload, machine: Machine, constants: Constants) -> Prediction:
    """Return the prediction for one layout. The layout need not be legal."""
    parts = {name: float(value) for name, value in step_parts(work, machine, constants).items()}
    stages = [
        {name: float(size) for name, size in stage_memory(work, machine, stage).items()}
        for stage in _stages_shown(int(work.layout.pp))
    ]
    memory = float(peak_memory(work, machine))
    return Prediction(work, parts, memory, float(p_out_of_memory(memory, work, machine)), stages, machine)


def _stages_shown(pp: int) -> list[int]:
    """Return the pipeline ranks to show: all ranks of a short pipeline, or eight evenly spaced ranks of a long one,
    including the first and the last."""
    return list(range(pp)) if pp <= 8 else sorted({round(i * (pp - 1) / 7) for i in range(8)})


def make_plan(
    base: Workload,
    machine: Machine,
    constants: Constants,
    gpus: int,
    top: int = 10,
    limits: SearchLimits | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find the fastest layouts that fit into memory.

    Args:
        base: The model and its step.
        machine: The machine to plan for.
        constants: The planner's constants for the machine (``constants_for``).
        gpus: Number of GPUs.
        top: Largest number of layouts to return.
        limits: Limits of the search.
        watch: Called with the number of evaluated layouts and the number of legal layouts.

    Returns:
        The plan, with the ``top`` fastest layouts, best first.

    Raises:
        UserError: No layout is within the limits, is legal, and fits into memory. If no legal layout fits, the message
            names a change that helps.
    """
    found = search(base, machine, constants, gpus, limits, watch)
    if not len(found.order):
        raise UserError(_nothing_fits(base, machine, constants, gpus, limits, found))
    ranked = [predict(found.point(index), machine, constants) for index in found.order[:top]]
    return Plan(ranked[0], ranked, found, machine, constants, gpus)


def _nothing_fits(
    base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits | None, found: Found
) -> str:
    """Return a sentence that says why no layout is legal, or why no legal layout fits into memory. In the second case,
    the sentence also names a change that helps."""
    legal = np.flatnonzero(np.isfinite(found.seconds))
    if not len(legal):
        reason = max(found.rejected().items(), key=lambda item: item[1])[0]
        return (
            f"no layout of {gpus} GPUs is legal; the most common reason: {reason}; "
            f"change --gpus or --global-batch ({int(base.step.global_batch_size)} sequences)"
        )
    least = legal[np.argmin(found.memory[legal])]
    point = predict(found.point(least), machine, constants)
    likely = f", so it runs out of memory with a probability of {point.p_oom:.0%}" if point.p_oom < 0.995 else ""
    sentence = (
        f"nothing fits: of {len(legal):,} legal layouts, {point.describe()} needs the least memory, "
        f"{point.memory_bytes / 1e9:.1f} GB, but a {machine.name} GPU has {machine.memory / 1e9:.0f} GB{likely}"
    )
    limits = limits or SearchLimits()
    leanest = replace(limits, micro_batches=limits.micro_batches[:1])
    for more in (gpus * 2**i for i in range(1, 7)):
        for batch in sorted({base.step.global_batch_size, max(base.step.global_batch_size, more)}):
            if _something_fits(base.but(global_batch_size=batch), machine, constants, more, leanest):
                grown = f" with a global batch of {int(batch)}" if batch != base.step.global_batch_size else ""
                return f"{sentence}; {more} GPUs{grown} would be enough, or a shorter --seq"
    return f"{sentence}; use a machine with more memory, or a smaller model"


def _something_fits(base: Workload, machine: Machine, constants: Constants, gpus: int, limits: SearchLimits) -> bool:
    try:
        return len(search(base, machine, constants, gpus, limits).order) > 0
    except UserError:  # With these limits, there is no layout at all.
        return False
