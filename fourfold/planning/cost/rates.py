"""Rates of a machine under a program."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


class Rates:
    """Rates of a machine under a program."""

    def __init__(self, work: Workload, machine: Machine, constants: Constants) -> None:
        step = work.step
        rate = np.where(step.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, machine.achieved)
        # Compute it relative to the peak, because a higher achieved rate in 16 bits must not lower the rate in 32 bits.
        self.attention = constants.attention * np.where(
            step.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch
        # fourfold scores tokens in 32 bits. Other programs multiply 16 bits and sum in 32.
        self.router = np.where(work.program.is_fourfold, constants.matmul * machine.achieved_fp32, self.head)
