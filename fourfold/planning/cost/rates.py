"""Compute the rates that a step reaches on a machine."""

import numpy as np

from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


class Rates:
    """The rates that a step reaches on a machine: FLOP/s of matmuls and attention, bytes per second of memory, and
    seconds per kernel launch. ``nn``, ``nt``, and ``tn`` are factors on the matmul rates."""

    def __init__(self, work: Workload, machine: Machine, constants: Constants) -> None:
        step = work.step
        rate = np.where(step.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, machine.achieved)
        # Assume that attention in 32 bits is slower than in 16 bits by the same ratio as matmuls. Divide the 32-bit
        # matmul rate by the 16-bit peak. If we divided it by the achieved 16-bit rate, a higher 16-bit rate would make
        # attention in 32 bits slower.
        self.attention = constants.attention * np.where(
            step.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch
        # fourfold computes router scores in fp32. Other frameworks multiply 16-bit numbers and accumulate in fp32.
        self.router = np.where(work.program.is_fourfold, constants.matmul * machine.achieved_fp32, self.head)
