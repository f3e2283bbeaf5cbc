"""Run a run file on the grid in its own dtypes, and compare the rounding errors with one process in these dtypes.

Low precision rounds in every operation, so single values say little. The error over several steps is a statistic that
should be similar on the grid and on one process. The grid's error may be 50 % larger, because the grid also rounds
partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.dtypes import DTYPES
from fourfold.models.mixture import is_router_bias
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import LocalShard
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.deviation import relative_rms
from fourfold.verification.one_process import Parameters, PlainLogits, Reference
from fourfold.verification.parity_report import Deviation
from fourfold.verification.reference_batches import random_batch

STEPS = 4

FP16_SCALE = 1024.0
"""The first loss scale. In most small models, it causes neither overflows nor lost gradients."""

LESS = 16.0
"""The factor by which an overflow reduces the loss scale. It is so large that the gradients of one process and of later
steps do not overflow either. One process must overflow too if its scale is four times as large as the scale with which
the grid overflows."""

OVERFLOWS_AT = 2.0**60
"""A loss scale so large that every gradient overflows."""


Gather = Callable[[Sequence[LocalShard], Sequence[Tensor]], dict[str, Tensor] | None]
"""Compares the replicas, and returns whole tensors on rank 0."""


class SameTypes(Reference):
    """One process that rounds wherever the run file's dtypes require it: weights, activations, sums, and stored
    weights."""

    def __init__(self, run: RunConfig, weights: Parameters, device: torch.device) -> None:
        super().__init__(run, PlainLogits(run), weights, device, _stored(run))
        self.optimizer.matmul_dtype = torch.bfloat16  # Muon multiplies in bfloat16 in fp16 runs too.
        self.rounding = torch.Generator(device).manual_seed(0)

    def parameters(self, averaged: bool = False) -> Parameters:
        """Return the weights in the dtype of the step."""
        dtype = DTYPES[self.run.training.precision]
        whole = super().parameters(averaged)
        return {name: weight if is_router_bias(name) else weight.to(dtype) for name, weight in whole.items()}

    def after_backward(self) -> None:
        """Round the sums of gradients to their dtype."""
        dtype = DTYPES[self.run.training.reduce_dtype]
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(dtype).to(parameter.dtype)

    @torch.no_grad()
    def after_step(self) -> None:
        """If the run file asks for it, round the weights stochastically: add noise to the lower half of their bits, and
        keep only the upper half."""
        for weight in self.trained.values() if self.run.optimizer.stochastic_rounding else ():
            noise = torch.randint(0, 1 << 16, weight.shape, generator=self.rounding, device=weight.device)
            weight.copy_(((weight.view(torch.int32) + noise.int()) & -(1 << 16)).view(torch.float32))


def compare_own_types(run: RunConfig, grid: Grid, device: torch.device, gather: Gather) -> list[Deviation]:
    """Train a few steps on the grid in the run's own dtypes. Every process calls this.

    With fp16, one additional step overflows, and must change nothing.

    Returns:
        On rank 0, the relative errors of gradients and weights of the grid and of one process. Empty on other ranks.
    """
    job = Job(run, grid, device)
    job.initialize(run.training.seed)
    weights = gather(job.shards, [shard.local for shard in job.shards])
    exact = None if weights is None else Reference(run, PlainLogits(run), weights, device, torch.float64)
    references = [] if weights is None or exact is None else [SameTypes(run, weights, device), exact]
    too_early: list[Deviation] = []
    squares = torch.zeros(2, 2)  # Summed squared errors. Rows: one process, the grid. Columns: gradients, weights.
    scale = FP16_SCALE if run.training.precision == "fp16" else 1.0
    for step in range(STEPS):
        if job.loss_scale is not None and step == 1:
            job.loss_scale.scale = OVERFLOWS_AT
            _step(job, step)
        before = scale
        scale, graded, local = _finite_step(job, step, scale)
        if weights is not None and scale < before and _stays_finite(run, weights, device, step, 4 * LESS * scale):
            too_early.append(Deviation(f"step {step + 1} overflows on the grid only", math.inf, 0.0))
        gradients = gather(graded, local)
        if references:
            references[0].loss_scale = scale
        weights = gather(job.shards, [shard.local for shard in job.shards])
        if gradients is not None and weights is not None:
            squares += _errors(job, references, step, gradients, weights).square()
    one, on_grid = (squares / STEPS).sqrt().tolist()
    return too_early + [Deviation(*e) for e in zip(("gradients", "weights"), on_grid, one, strict=True) if references]


def _errors(
    job: Job, references: list[Reference], step: int, gradients: dict[str, Tensor], weights: dict[str, Tensor]
) -> Tensor:
    """Take a step with the references. Return the errors of gradients and weights, for one process and for the grid.

    Gradients of queries and keys that are thousands of times smaller than the other gradients are left out. In low
    precision, attention kernels compute them as differences of large numbers, so their error depends on the kernel.
    """
    negligible = torch.finfo(DTYPES[job.run.training.precision]).eps / 16
    batch = random_batch(job.run, step, job.device)
    one, exact = (reference.step(step, batch, job.run.optimizer.max_grad_norm) for reference in references)
    of_one, of_exact = (reference.weights() for reference in references)
    each = ((one.gradients, of_one), (gradients, weights))
    return torch.tensor([[relative_rms(g, exact.gradients, negligible), relative_rms(w, of_exact)] for g, w in each])


def _finite_step(job: Job, step: int, scale: float) -> tuple[float, list[LocalShard], list[Tensor]]:
    """Take a step with a loss scale. If gradients overflow, take it again with a smaller scale.

    Returns:
        The last loss scale, the shards that have gradients, and these gradients. If gradients overflow with a scale
        below 1, they are infinite or NaN.
    """
    while True:
        if job.loss_scale is not None:
            job.loss_scale.scale = scale
        is_finite, graded, gradients = _step(job, step)
        if is_finite or scale < 1:
            return scale, graded, gradients
        scale /= LESS


def _stays_finite(run: RunConfig, weights: Parameters, device: torch.device, step: int, scale: float) -> bool:
    """Return whether no gradient of a step overflows on one process with these weights and this loss scale."""
    one = SameTypes(run, weights, device)
    one.loss_scale = scale
    gradients = one.step(step, random_batch(run, step, device), math.inf).gradients
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def _step(job: Job, step: int) -> tuple[bool, list[LocalShard], list[Tensor]]:
    """Take a step on its random samples.

    Returns:
        Whether all gradients are finite, the shards that have gradients, and these gradients.
    """
    micro_batches = random_micro_batches(job.run, step, job.grid, job.device)
    job.forward_backward(micro_batches, job.count_kept(micro_batches))
    scale = 1.0 if job.loss_scale is None else job.loss_scale.scale
    found = [(shard, shard.grad / scale) for shard in job.trained if shard.grad is not None]
    is_finite = job.update(step, job.clip())
    return is_finite, [shard for shard, _ in found], [grad for _, grad in found]


def _stored(run: RunConfig) -> torch.dtype:
    """Return the dtype that holds the weights. Stochastic rounding computes in float32, and the weights are stored in
    bfloat16."""
    return torch.float32 if run.optimizer.stochastic_rounding else DTYPES[run.training.master_weights]
