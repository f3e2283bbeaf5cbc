"""Compute the rates that a program reaches on a machine."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


class Rates:
    """The rates that a program reaches on a machine."""

    def __init__(self, work: Workload, machine: Machine, constants: Constants) -> None:
        step = work.step
        rate = np.where(step.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, machine.achieved)
        # Compute this relative to the peak, because a higher achieved rate in 16 bits must not lower the rate in 32
        # bits.
        self.attention = constants.attention * np.where(
            step.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch
        # fourfold computes router scores in 32 bits. Other programs multiply in 16 bits and sum in 32 bits.
        self.router = np.where(work.program.is_fourfold, constants.matmul * machine.achieved_fp32, self.head)
