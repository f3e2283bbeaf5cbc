"""Compute the rates that a step reaches on a machine."""

import numpy as np

from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload


class Rates:
    """The rates that a step reaches on a machine.

    - matmul, head, router: FLOP/s of the matmuls in the blocks, in the head, and in the router of experts.
    - nn, nt, tn: factors on these FLOP/s, by the memory layout of the operands (see ``Machine``).
    - attention: FLOP/s of the fused attention kernel.
    - bandwidth: bytes per second of device memory.
    - units: number of processors of a device.
    - launch: seconds that the host needs to launch a kernel.
    """

    def __init__(self, work: Workload, machine: Machine, constants: Constants) -> None:
        step = work.step
        rate = np.where(step.bits == 8, machine.achieved_fp8, machine.achieved)
        self.matmul = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, rate)
        self.head = constants.matmul * np.where(step.bits == 32, machine.achieved_fp32, machine.achieved)
        # Assume that attention in 32 bits is slower than in 16 bits by the same ratio as matmuls. This ratio is the
        # 32-bit matmul rate divided by the 16-bit peak. If we divided by the achieved 16-bit rate, a machine with a
        # higher achieved rate would get slower attention in 32 bits.
        self.attention = constants.attention * np.where(
            step.bits == 32, machine.achieved_fp32 / machine.peak, 1.0
        ) * machine.attention  # fmt: skip
        self.nn, self.nt, self.tn = machine.nn, machine.nt, machine.tn
        self.bandwidth = constants.memory * machine.memory_bandwidth
        self.units = machine.units
        self.launch = constants.launch * machine.launch
        # fourfold computes router scores in fp32. Other frameworks multiply 16-bit numbers and accumulate in fp32.
        self.router = np.where(work.program.is_fourfold, constants.matmul * machine.achieved_fp32, self.head)
