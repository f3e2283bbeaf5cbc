"""Measure how far training in the run file's precision is from float64, on one process or on any grid."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fourfold.config.run import RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.deviation import relative_differences
from fourfold.verification.one_process import PlainLogits, Reference
from fourfold.verification.parity import shortened
from fourfold.verification.reference_batches import random_batch

LIMIT = 1.5
"""Largest allowed error of the grid, divided by the error of one process in the same precision. It is above 1 because
the grid also rounds partial sums."""

FP16_SCALE = 64.0
"""The loss scale of fp16 runs. With it, gradients of small models do not overflow, and few of them are rounded to
zero."""


class PrecisionError(NamedTuple):
    """Relative differences from float64, as root mean squares over steps and tensors."""

    loss: float
    gradients: float
    weights: float


def precision_error(run: RunConfig, device: torch.device, steps: int = 16) -> PrecisionError | None:
    """Return the error of ``steps`` steps, on rank 0 only. Every process of the grid calls this."""
    scaling = run.loss_scaling.model_copy(update={"initial": FP16_SCALE})
    run = shortened(run, steps).model_copy(update={"loss_scaling": scaling})
    job = Job(run, Grid(run.parallel, device.type), device)
    job.initialize(run.training.seed)
    weights = gather_full(job.shards, [shard.local for shard in job.shards])
    exact = None if weights is None else Reference(run, PlainLogits(run), weights, device, torch.float64)
    errors = [error for step in range(steps) if (error := _error_of_step(job, exact, step)) is not None]
    if exact is None:
        return None
    return PrecisionError(*(math.sqrt(sum(e * e for e in each) / steps) for each in zip(*errors, strict=True)))


def _error_of_step(job: Job, exact: Reference | None, step: int) -> PrecisionError | None:
    micro_batches = random_micro_batches(job.run, step, job.grid, job.device)
    loss = job.forward_backward(micro_batches, job.count_kept(micro_batches)).double()
    scale = 1.0 if job.loss_scale is None else job.loss_scale.scale
    gradients = gather_full(job.trained, [shard.grad / scale for shard in job.trained if shard.grad is not None])
    job.update(step, job.clip())
    weights = gather_full(job.shards, [shard.local for shard in job.shards])
    if exact is None or gradients is None or weights is None:
        return None
    expected = exact.step(step, random_batch(job.run, step, job.device), job.run.optimizer.max_grad_norm)
    relative = float(((loss - expected.loss) / expected.loss).abs())
    differences = relative_differences(gradients, expected.gradients), relative_differences(weights, exact.weights())
    return PrecisionError(relative, *(math.sqrt(sum(d**2 for d in each.values()) / len(each)) for each in differences))
