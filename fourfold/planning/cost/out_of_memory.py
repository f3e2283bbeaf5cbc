"""Compute the memory that a program needs in addition to its tensors, and the probability that a step runs out of
memory."""

import math

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

UNUSABLE = 0.06
"""Memory that a step needs in addition to its tensors, as a fraction of the bytes of the tensors. PyTorch's allocator
rounds sizes up and fragments memory, and libraries allocate workspaces. (Megatron-LM's own estimate adds 5 %.)"""
FRAGMENTED = 0.09
"""The value of ``UNUSABLE`` if the program does not use expandable segments. The allocator can then release only
segments that are not in use at all, so most of its cached memory stays unusable (PyTorch, "CUDA semantics": memory
management)."""
CACHED = 0.14
"""The same fraction as ``UNUSABLE``, but including freed memory that the allocator caches until memory runs low. We
fitted the value to the measured runs that come with fourfold, with ``UNUSABLE`` as prior
(docs/planner_validation.py)."""
COMMUNICATOR = 0.5e9
"""Bytes that the communicator of one process group takes on a device. NCCL allocates channels of 4 to 8 MB for each of
a few protocols and peers, in both directions."""
SPREAD = 0.07
"""Standard deviation of log(needed bytes / predicted bytes). The value is an assumption for fourfold, whose tensors are
counted exactly. For other frameworks, the ratio of measured to predicted bytes varies more
(docs/planner_validation.py)."""


def runtime_bytes(work: Workload, machine: Machine) -> Number:
    """Return the bytes that the driver and the communication library use on every device."""
    layout = work.layout
    groups = sum(
        np.where(size > 1, 1, 0) for size in (layout.x, layout.y, layout.z, layout.dp, layout.cp, layout.ep)
    ) + 2 * (layout.pp > 1)
    return machine.reserved + COMMUNICATOR * groups


def cached_share(work: Workload) -> Number:
    """Return the unused memory that the allocator holds, as a fraction of the bytes that a step allocates. The fraction
    is 0 if predictions leave this memory out (``Program.count_cached``)."""
    return np.where(work.program.count_cached, CACHED, 0)


def p_out_of_memory(predicted: Number, work: Workload, machine: Machine) -> Number:
    """Return the probability that a step runs out of memory, if ``peak_memory`` has predicted ``predicted`` bytes. The
    bytes that the step really needs are assumed to be log-normally distributed."""
    return normal_share(np.log(needed_bytes(predicted, work, machine) / machine.memory) / SPREAD)


def needed_bytes(predicted: Number, work: Workload, machine: Machine) -> Number:
    """Return the smallest device memory, in bytes, that a step still fits into, if ``peak_memory`` has predicted
    ``predicted`` bytes. If the prediction includes the runtime and cached memory (``Program``), the returned size is
    smaller than the prediction, because PyTorch frees cached memory before it runs out of memory."""
    runtime = runtime_bytes(work, machine)
    allocated = (predicted - np.where(work.program.count_runtime, runtime, 0)) / (1 + cached_share(work))
    unusable: Number = np.where(work.program.expandable_segments, UNUSABLE, FRAGMENTED)
    return runtime + allocated * (1 + unusable)


def normal_share(x: Number) -> Number:
    """Return the cumulative distribution function of the standard normal at x, with an error of at most 2e-7
    (Abramowitz & Stegun 7.1.26)."""
    x = x / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * np.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 0.5 * (1 + np.sign(x) * (1 - series * np.exp(-x * x)))
