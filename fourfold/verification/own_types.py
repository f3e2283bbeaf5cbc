"""Train on the grid in the dtypes that the run file names, and compare the rounding errors with one process in the same
dtypes.

In low precision, every operation rounds, so the error of a single value says little. But the error over several steps
should be similar on the grid and on one process. The grid's error may be 50 % larger, because the grid also rounds
partial sums.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.dtypes import DTYPES
from fourfold.models.mixture import is_router_bias
from fourfold.parallel.data.replicated import Replicated
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import true_on_any_rank
from fourfold.parallel.state import LocalShard
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.deviation import ROUNDING, relative_differences
from fourfold.verification.one_process import Parameters, PlainLogits, Reference
from fourfold.verification.parity_report import Deviation
from fourfold.verification.reference_batches import random_batch
from fourfold.verification.stochastic_rounding import STANDARD_ERRORS, rounding_error
from fourfold.verification.watched_collectives import WatchedCollectives

STEPS = 4

FP16_SCALE = 1024.0
"""The first loss scale. In most small models, gradients neither overflow nor underflow with it."""

LESS = 16.0
"""After an overflow, the loss scale is divided by this number. It is large, so that after one division, gradients
probably overflow neither in later steps nor on one process, which uses the same scale as the grid."""

OVERFLOWS_AT = 2.0**60
"""A loss scale so large that every gradient overflows."""

OF_ONE_TENSOR = 2.0
"""The error limit for the tensor with the worst gradients is this many times the limit for all gradients together. The
limit is higher because chance has more effect on the rounding errors of a single tensor."""


Taken = tuple[float, list[LocalShard], list[Tensor], set[torch.dtype]]
"""The result of ``_step``: the loss scale, the shards that have gradients, the gradients, and the dtypes sent."""

Gather = Callable[[Sequence[LocalShard], Sequence[Tensor]], dict[str, Tensor] | None]
"""The type of ``Comparison.gather``, a function that joins the shards of all processes. On rank 0, it returns the full
tensors by name. On other ranks, it returns None."""


class SameTypes(Reference):
    """A reference on one process that computes in the run file's dtypes. Like the grid, it rounds working weights,
    activations, sums of gradients, and stored weights."""

    def __init__(self, run: RunConfig, weights: Parameters, device: torch.device) -> None:
        super().__init__(run, PlainLogits(run), weights, device, _stored(run))
        # Muon multiplies in bfloat16, even in fp16 runs.
        self.optimizer.matmul_dtype = torch.bfloat16
        self.rounding = torch.Generator(device).manual_seed(0)

    def parameters(self, averaged: bool = False) -> Parameters:
        """Return the weights in the dtype of ``training.precision``. Only the biases of routers keep the stored
        dtype."""
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
    """Train a few steps on the grid in the run's own dtypes, and compare the errors with one process. Every process
    must call this.

    With fp16, one additional step overflows on purpose. This step must not change any weight.

    Args:
        run: The run.
        grid: The grid.
        device: This process's device.
        gather: Joins shards to full tensors (``Comparison.gather``).

    Returns:
        On rank 0, a list of deviations. The result on other ranks has no meaning. The list has:

        - the relative errors of all gradients, of all weights, and of the tensor with the worst gradients, on the
          grid and on one process
        - with stochastic rounding, the error of the rounding, in standard errors
        - an infinite deviation if the grid sums gradients in a wrong dtype
        - an infinite deviation if the grid computes with stale weights
        - an infinite deviation if the grid overflows with a loss scale, although one process does not overflow with
          four times this scale
    """
    job = Job(run, grid, device)
    job.initialize(run.training.seed)
    weights = gather(job.shards, [shard.local for shard in job.shards])
    in_float64 = None if weights is None else Reference(run, PlainLogits(run), weights, device, torch.float64)
    references = [] if weights is None or in_float64 is None else [SameTypes(run, weights, device), in_float64]
    found: list[Deviation] = []
    is_stale = False
    errors: dict[str, list[Deviation]] = {"gradients": [], "weights": []}
    scale = FP16_SCALE if run.training.precision == "fp16" else 1.0
    for step in range(STEPS):
        if job.loss_scale is not None and step == 1:
            _step(job, step, OVERFLOWS_AT, smallest=math.inf)
        scale_before, before = scale, weights
        scale, graded, local, sent = _step(job, step, scale)
        is_stale = is_stale or not _is_published(job)
        gradients = gather(graded, local)
        weights = gather(job.shards, [shard.local for shard in job.shards])
        if before is None or weights is None or gradients is None:
            continue
        references[0].loss_scale = scale
        batch = random_batch(run, step, device)
        one, exact = (reference.step(step, batch, run.optimizer.max_grad_norm) for reference in references)
        errors["gradients"] += _errors(one.gradients, gradients, exact.gradients, _negligible(run))
        of_one, of_exact = (reference.weights() for reference in references)
        errors["weights"] += _errors(of_one, weights, of_exact)
        if scale < scale_before and _stays_finite(run, before, device, step, 4 * LESS * scale):
            found.append(Deviation(f"step {step + 1} overflows on the grid only", math.inf, 0.0))
        if _sums_in_another_dtype(job, sent, scale, gradients, one.gradients):
            found.append(Deviation("dtype of gradient sums", math.inf, 0.0))
        if step == 0 and run.optimizer.stochastic_rounding and run.training.reduce_dtype == "fp32":
            off = rounding_error(run, before, gradients, weights)
            found.append(Deviation("random rounding", off, STANDARD_ERRORS))
    if true_on_any_rank(is_stale or not _is_published_again(job), device, "working copies"):
        found.append(Deviation("working copies", math.inf, 0.0))
    return found + [_root_mean_square(*each) for each in errors.items()] + _worst_of(errors["gradients"])


def _errors(one: Parameters, grid: Parameters, exact: Parameters, negligible: float = ROUNDING) -> list[Deviation]:
    """Return the relative error of each tensor in one step, on the grid and on one process."""
    of_one, of_grid = (relative_differences(each, exact, negligible) for each in (one, grid))
    return [Deviation(name, of_grid[name], of_one[name]) for name in of_one]


def _negligible(run: RunConfig) -> float:
    """Return a limit for the norm of a gradient, as a fraction of the norm of all gradients together. Parity does not
    compare gradients with a smaller norm.

    In low precision, attention kernels compute small gradients of queries and keys as differences of large numbers. The
    errors of these gradients depend on the kernel, so they say nothing about the grid.
    """
    return torch.finfo(DTYPES[run.training.precision]).eps / 16


def _root_mean_square(name: str, errors: Iterable[Deviation]) -> Deviation:
    squares = torch.tensor([(error.grid**2, error.one_process**2) for error in errors] or [(0.0, 0.0)])
    return Deviation(name, *squares.mean(0).sqrt().tolist())


def _worst_of(gradients: list[Deviation]) -> list[Deviation]:
    """Return a list with one element, the deviation of the tensor with the worst gradients. The list is empty if there
    are no gradients.

    A tensor's error on the grid is compared with ``OF_ONE_TENSOR`` times the larger of two errors on one process: the
    error of the tensor, and the error of all tensors together.
    """
    typical = _root_mean_square("", gradients).one_process
    names = dict.fromkeys(error.tensor for error in gradients)
    each = [_root_mean_square(name, [e for e in gradients if e.tensor == name]) for name in names]
    each = [e._replace(one_process=OF_ONE_TENSOR * max(e.one_process, typical)) for e in each]
    return sorted(each, key=lambda error: error.ratio)[-1:]


def _sums_in_another_dtype(
    job: Job, sent: set[torch.dtype], scale: float, gradients: Parameters, of_one: Parameters
) -> bool:
    """Return whether the grid sums gradients in another dtype than the run file's ``reduce_dtype``.

    There are two checks:

    - Every rank must send its gradients in ``reduce_dtype``.
    - If ``reduce_dtype`` is the dtype of ``training.precision`` (bf16 or fp16), this dtype must represent all sums
      exactly. If ``reduce_dtype`` is float32, at least one sum must have more bits than the dtype of
      ``training.precision``. For float32, the check is skipped if the dtype of ``training.precision`` also represents
      all sums of one process exactly, for example because each sum has only one summand.

    The second check ignores parameters whose gradients are also summed over x or y (such as norms and biases). It also
    ignores the embedding, because a pipeline sums the gradient of a tied embedding over pp. These additional sums may
    have another dtype.
    """
    low, dtype = DTYPES[job.run.training.precision], DTYPES[job.run.training.reduce_dtype]
    names = {shard.name for shard in job.trained if not shard.tile.partial_over} & gradients.keys() & of_one.keys()
    names -= {"embed_tokens.weight"}

    def are_rounded(sums: Parameters) -> bool:
        scaled = [scale * sums[name].float() for name in names]
        return all(torch.equal(each, each.to(low).float()) for each in scaled)

    is_visible = dtype == low or not are_rounded(of_one)
    return bool(sent - {dtype}) or (is_visible and are_rounded(gradients) != (dtype == low))


def _is_published(job: Job) -> bool:
    """Return whether the working copies of the weights on this process are up to date: each copy must equal the stored
    weight, rounded to the dtype of the copy.

    Sharded weights have no working copies, because they are rounded each time they are gathered.
    """
    whole = [stage for stage in job.stages.values() if isinstance(stage, Replicated)]
    pairs = [(weight.working, weight.stored) for stage in whole for weight in stage.weights.values()]
    return all(torch.equal(working, stored.to(working.dtype)) for working, stored in pairs)


def _stays_finite(run: RunConfig, weights: Parameters, device: torch.device, step: int, scale: float) -> bool:
    """Return whether all gradients of a step stay finite on one process that has these weights and uses this loss
    scale."""
    one = SameTypes(run, weights, device)
    one.loss_scale = scale
    gradients = one.step(step, random_batch(run, step, device), math.inf).gradients
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def _is_published_again(job: Job) -> bool:
    """Multiply all weights by 1.5, let the job update its working copies, and return ``_is_published``. This finds
    stale copies that a training step may hide: a step can change the weights of norms so little that their rounded
    working copies stay the same."""
    with job.replacing_weights():
        for shard in job.shards:
            shard.local.mul_(1.5)
    return _is_published(job)


def _step(job: Job, step: int, scale: float, smallest: float = 1.0) -> Taken:
    """Take a step on random samples with a loss scale. If gradients overflow, repeat the step with a smaller scale.

    Returns:
        First, the loss scale that was used last. Then the shards that have gradients, the gradients of these shards,
        and the dtypes of the gradients that this process sent. If gradients overflow with a scale below ``smallest``,
        the step is not repeated, and some gradients are infinite or NaN.
    """
    while True:
        if job.loss_scale is not None:
            job.loss_scale.scale = scale
        micro_batches = random_micro_batches(job.run, step, job.grid, job.device)
        kept = job.count_kept(micro_batches)
        with WatchedCollectives(job.grid, job.device.type != "cpu") as watched:
            job.forward_backward(micro_batches, kept)
        found = [(shard, shard.grad / scale) for shard in job.trained if shard.grad is not None]
        if job.update(step, job.clip()) or scale < smallest:
            return scale, [shard for shard, _ in found], [grad for _, grad in found], watched.dtypes["gradients"]
        scale /= LESS


def _stored(run: RunConfig) -> torch.dtype:
    """Return the dtype of the tensors that hold the reference's weights. With stochastic rounding, this is float32, and
    the values in these tensors are rounded to bfloat16."""
    return torch.float32 if run.optimizer.stochastic_rounding else DTYPES[run.training.master_weights]
