"""Define the constants that no data sheet lists. They say how close a training step gets to the machine's rates.

Each constant has a prior from published measurements, and ``calibration`` fits it to measured step times. The constants
are factors on the machine's rates, so the same constants also work for machines that have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import ArrayFields, Number


@dataclass(frozen=True)
class Constants(ArrayFields):
    """Constants of the cost formulas: fractions of a machine's rates, factors on times, and times.

    - matmul: fraction of the machine file's ``achieved`` rate. It is below 1, because a training run takes longer and
      heats the GPU more than the benchmark that measured this rate.
    - attention: fraction of the fused kernel's best rate that attention reaches.
    - memory: fraction of the memory bandwidth that pointwise operations reach.
    - launch: factor on the host time of a kernel launch.
    - intra, inter: fraction of the links' bandwidth that collectives reach, inside a node and between nodes.
    - latency: factor on the latency of a collective.
    - exposed: communication that computation could hide still costs this fraction of its time.
    - dispersion: relative standard deviation of the nodes' speeds. The slowest node sets the pace.
    - step: seconds that every step takes, regardless of its size.
    """

    matmul: Number
    attention: Number
    memory: Number
    launch: Number
    intra: Number
    inter: Number
    latency: Number
    exposed: Number
    dispersion: Number
    step: Number


class Prior(NamedTuple):
    """What is known about a constant before any measurement: the ``median`` of its distribution, and the standard
    deviation of its logarithm (``spread``). ``source`` says where these numbers come from."""

    median: float
    spread: float
    source: str


PRIORS: dict[str, Prior] = {
    "matmul": Prior(0.90, 0.10, "a GPU's clock is 5 to 15 % lower in training than in a benchmark"),
    "attention": Prior(0.90, 0.25, "as for matmul. Heads narrower than 128 are slower"),
    "memory": Prior(0.75, 0.25, "BabelStream-like kernels reach 80 to 90 % of the data sheet, short ones less"),
    "launch": Prior(1.0, 0.50, "the machine file's launch time"),
    "intra": Prior(0.75, 0.12, "nccl-tests: 230 of 300 GB/s on A100, 360 to 400 of 450 GB/s on H100"),
    "inter": Prior(0.75, 0.15, "nccl-tests on 200 and 400 Gb/s adapters: 85 to 95 %, less in production"),
    "latency": Prior(1.0, 0.50, "the machine file's latencies"),
    "exposed": Prior(0.15, 0.60, "kernels that run during communication lose processors and bandwidth to it"),
    "dispersion": Prior(0.005, 0.80, "nodes of one machine differ by half a percent: an assumption"),
    "step": Prior(0.010, 0.80, "synchronization, clipping, and data loading between steps"),
}
NAMES = tuple(f.name for f in fields(Constants))
assert tuple(PRIORS) == NAMES


def prior_constants() -> Constants:
    """Return the constants before any calibration."""
    return Constants(**{name: prior.median for name, prior in PRIORS.items()})


def moved(constants: Constants, logs: np.ndarray) -> Constants:
    """Return a copy of the constants. Multiply each constant by exp(its entry in ``logs``). The last dim of ``logs``
    has one entry per constant."""
    return replace(constants, **{name: getattr(constants, name) * np.exp(logs[..., i]) for i, name in enumerate(NAMES)})
