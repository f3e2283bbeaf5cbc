"""The planner's prediction of a run's memory, without the reserve, which the trace does not count."""

from __future__ import annotations

from fourfold.config.run import RunConfig
from fourfold.planning.cost.memory import stage_memory
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of


def planned_peak(run: RunConfig, rank: int = 0) -> float:
    """Return the peak bytes of a pipeline rank."""
    planned = stage_memory(workload_of(run), load_machine("dgx-h100"), rank)
    return float(sum(size for category, size in planned.items() if category != "reserve"))
