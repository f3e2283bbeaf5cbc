"""Compute the budget of a training run: days, GPU-hours, energy, price, and the best checkpoint interval. If GPUs fail,
also compute the *goodput*, which is the fraction of the time that is spent on training."""

import math
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.planning.machines.machine import Machine

RESTART_SECONDS = 600.0
"""Assumed seconds from a failure to the next training step: detecting the failure, starting a new job, and loading the
checkpoint."""
CHECKPOINT_BANDWIDTH = 1e9
"""Bytes per second that each GPU writes to storage, if the machine file has no ``checkpoint_bandwidth``."""


@dataclass(frozen=True)
class Costs:
    """The cost of training on a number of tokens. If ``goodput`` is known, days and GPU-hours include the time that
    failures and checkpoints take. A field is None if the machine file lacks a value that the field is computed from."""

    tokens: float
    days: float
    gpu_hours: float
    kwh: float | None
    price: float | None
    """Price of all GPU-hours, in the currency of the machine file's ``price_per_gpu_hour``."""
    checkpoint_seconds: float
    """Seconds to write one checkpoint."""
    checkpoint_interval_seconds: float | None
    """The interval between checkpoints that loses the least time, in seconds."""
    mtbf_hours: float | None
    """Mean time between failures of the job, in hours."""
    goodput: float | None
    """Fraction of the time that is spent on training. The remaining time is spent on checkpoints, lost work, and
    restarts."""


def costs(tokens: float, tokens_per_second: float, gpus: int, saved: float, machine: Machine) -> Costs:
    """Compute how long training takes and what it costs.

    Args:
        tokens: Number of tokens to train on.
        tokens_per_second: Throughput of all GPUs, in tokens per second.
        gpus: Number of GPUs.
        saved: Size of a checkpoint in bytes.
        machine: The machine to train on.

    Raises:
        UserError: The GPUs fail so often that checkpoints, lost work, and restarts would take all of the time.
    """
    seconds = tokens / tokens_per_second
    writing, interval = checkpoint_seconds(saved, gpus, machine)
    goodput = mtbf = None
    if machine.mtbf_gpu_hours is not None and interval is not None:
        mtbf = machine.mtbf_gpu_hours / gpus
        lost = writing / interval + (interval / 2 + RESTART_SECONDS) / (mtbf * 3600)
        goodput = 1 - lost
        if goodput <= 0:
            raise UserError(
                f"one of {gpus} GPUs of {machine.name} fails every {mtbf:.2g} hours, so checkpoints and restarts would "
                f"take all of the time; "
                f"use fewer GPUs, or faster checkpoint storage (costs.checkpoint_bandwidth in the machine file)"
            )
    hours = seconds / 3600 / (1.0 if goodput is None else goodput)
    gpu_hours = hours * gpus
    return Costs(
        tokens=tokens,
        days=hours / 24,
        gpu_hours=gpu_hours,
        kwh=None if machine.watts_per_gpu is None else gpu_hours * machine.watts_per_gpu / 1000,
        price=None if machine.price_per_gpu_hour is None else gpu_hours * machine.price_per_gpu_hour,
        checkpoint_seconds=writing,
        checkpoint_interval_seconds=interval,
        mtbf_hours=mtbf,
        goodput=goodput,
    )


def checkpoint_seconds(saved: float, gpus: int, machine: Machine) -> tuple[float, float | None]:
    """Return the seconds to write a checkpoint of ``saved`` bytes, and the interval between checkpoints that loses the
    least time, in seconds.

    The interval is None if the machine file has no ``mtbf_gpu_hours`` (mean time between failures of one GPU).
    """
    writing = saved / ((machine.checkpoint_bandwidth or CHECKPOINT_BANDWIDTH) * gpus)
    mtbf = machine.mtbf_gpu_hours
    return writing, None if mtbf is None else checkpoint_interval(writing, mtbf / gpus * 3600)


def checkpoint_interval(writing: float, mtbf: float) -> float:
    """Return the interval between checkpoints that loses the least time, √(2 · writing · MTBF) (Young 1974, Daly 2006).

    Args:
        writing: Seconds to write a checkpoint.
        mtbf: Mean time between failures of the job, in seconds.

    Returns:
        The interval in seconds.
    """
    return math.sqrt(2 * writing * mtbf)
