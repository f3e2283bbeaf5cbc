"""Seconds in which a block's input goes to the host's memory and comes back."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


def offload_seconds(work: Workload, machine: Machine) -> Number:
    """Seconds of one block, forward and backward: copies run in the order of the step, behind nothing
    (parallel.recompute)."""
    layout = work.layout
    residual = work.step.item_bytes * work.tokens * work.model.hidden / (layout.x * layout.y)
    return 2 * residual * layout.recomputing / np.maximum(machine.host, 1.0)  # refused where it is unknown
