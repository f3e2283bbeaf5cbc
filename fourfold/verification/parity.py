"""Parity: check that the layout of a run file computes what one process computes.

The run file's model trains for a few steps on its grid in float32. On rank 0, a reference model on one process takes
the same steps, from the same weights and with the same samples. It does so twice: in float64 and in float32. The error
of a float32 result is its difference from the float64 result. For each tensor, the grid's error may be at most
``LIMIT`` times the error of the float32 reference.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.config.layout import check_layout
from fourfold.config.run import AXES, ParallelConfig, RunConfig
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import choose_device
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.training.loss_scaling import LossScale
from fourfold.verification.comparison import Comparison
from fourfold.verification.imported_model import compare_import
from fourfold.verification.not_compared import Against, in_own_types, not_compared
from fourfold.verification.own_types import compare_own_types
from fourfold.verification.parity_report import ParityReport
from fourfold.verification.random_corpora import can_write
from fourfold.verification.trained_run import trained_run

LEARNING_RATE = 1e-3
"""Learning rate for parity. It is so large that a missing update or a missing weight decay is visible in the
weights."""

ADAM_EPS = 1e-3
"""Adam's eps for parity. Adam divides by √v + eps. With a small eps, a gradient that is only rounding noise would move
its weight by a full step, in a different direction on each machine."""

LION_EPS = 1e-4
"""Lion's eps for parity. If Lion's momentum is between -eps and eps, the update is linear in the momentum, and not its
sign. Rounding noise is far smaller than eps. With eps = 0, rounding noise could change the sign of an update."""

WARMUP_STEPS = 2
"""Parity shortens a longer warm-up to this many steps. A warm-up of only one step would have no effect, because its
first step would already have the peak learning rate."""

MAX_GRAD_NORM = 0.1
"""Parity lowers a larger clipping limit to this value. The initial gradient norm of any model is larger, so clipping
has an effect."""

UNREACHED_GRAD_NORM = 1e6
"""Clipping limit in the last step. No gradient norm reaches it, so parity also tests a step without clipping."""


def parity_of_place(place: Place, run: RunConfig, steps: int, against: Against) -> ParityReport | None:
    """Run ``parity`` as the process of a job that ``place`` describes."""
    return parity(run, choose_device(place, run.training.device), steps, against, place)


def parity(
    run: RunConfig, device: torch.device, steps: int = 3, against: Against = "plain", place: Place | None = None
) -> ParityReport | None:
    """Compare training on the grid with training on one process. Every process of the grid must call this.

    Args:
        run: The run whose layout is checked.
        device: The device of this process.
        steps: Number of training steps to compare. After these steps, parity drops the update of one step, and
            compares one more step.
        against: The reference model: "plain" is fourfold's decoder in plain PyTorch, and "transformers" is the same
            model in the transformers library.
        place: The rank of this process, and the size of the job (default: all processes are on one machine).

    Returns:
        The report on rank 0, and None on all other processes.

    Raises:
        UserError: The transformers library is not installed or has no such model. Or the grid cannot be created (see
            ``Grid``). Or no label of a step is in the loss. Or the trainer stops with an error although parity has
            found no deviation.
        WriteFailed: The run's output folder cannot be written.
    """
    asked, run = run, as_verified(run, steps)
    job = Job(run, Grid(run.parallel, device.type), device)
    if asked.training.precision == "fp16":  # Test loss scaling. Scaling by a power of two is exact.
        job.loss_scale = LossScale(asked.loss_scaling, asked.loss_scaling.initial)
    imported = compare_import(job) if against == "transformers" and run.model.from_hf is not None else []
    job.initialize(run.training.seed)
    comparison = Comparison(job, against)
    if imported:
        comparison.deviations["imported"] = imported
    for step in range(steps + 1):
        if step == steps:
            comparison.dropped_step(job, step)
            optimizer = run.optimizer.model_copy(update={"max_grad_norm": UNREACHED_GRAD_NORM})
            job.run = run.model_copy(update={"optimizer": optimizer})
        comparison.step(job, step)
    other = resharded(run)
    if can_write(run):
        folder = Path(run.output_dir) / f".parity-{run.name}"
        rank, size = dist.get_rank(), dist.get_world_size()
        place = place or Place(rank, rank, size, size, launcher="local")
        # With fp16, make a step's gradients overflow, so that the trainer drops the step. Do not do this with experts,
        # because a dropped step changes the recorded load of the experts.
        overflows = asked.training.precision == "fp16" and not run.model.num_experts
        comparison.resumed(trained_run(run, folder, device), other.parallel, place, overflows)
    if in_own_types(asked):
        comparison.own_types = compare_own_types(shortened(asked, steps), job.grid, device, comparison.gather)
    if dist.get_rank() != 0:
        return None
    c, left_out = comparison, not_compared(asked, run, against)
    return ParityReport(c.deviations, c.replicas, c.initial, other.parallel.describe(), left_out, c.own_types)


def as_verified(run: RunConfig, steps: int) -> RunConfig:
    """Return the run as parity runs it: in float32, and with the whole learning-rate schedule in a few steps."""
    exact = {"precision": "fp32", "master_weights": "fp32", "reduce_dtype": "fp32", "float8": "none"}
    training = run.training.model_copy(update=exact)
    optimizer = run.optimizer.model_copy(update={"stochastic_rounding": False})
    return shortened(run.model_copy(update={"training": training, "optimizer": optimizer}), steps)


def shortened(run: RunConfig, steps: int) -> RunConfig:
    """Return the run with only a few steps. Change some values so that the learning-rate schedule, the masks, gradient
    clipping, and the optimizer all have an effect in these steps."""
    optimizer = {
        "lr": LEARNING_RATE,
        "eps": max(run.optimizer.eps, LION_EPS if run.optimizer.name == "lion" else ADAM_EPS),
        "max_grad_norm": min(run.optimizer.max_grad_norm, MAX_GRAD_NORM),
    }
    goldfish = run.masks.goldfish
    goldfish = goldfish.model_copy(update={"start_step": min(goldfish.start_step, 1)})
    warmup_steps = min(run.lr_scheduler.warmup_steps, WARMUP_STEPS)
    return run.model_copy(
        update={
            "training": run.training.model_copy(update={"train_steps": steps + 2, "compile": False}),
            "optimizer": run.optimizer.model_copy(update=optimizer),
            "lr_scheduler": run.lr_scheduler.model_copy(update={"warmup_steps": warmup_steps}),
            "masks": run.masks.model_copy(update={"goldfish": goldfish}),
        }
    )


def resharded(run: RunConfig) -> RunConfig:
    """Return the run with another grid that has the same number of processes.

    The new grid swaps the sizes of axes, merges all axes into one, or changes ``zero`` or ``ep``. If possible, it has
    another ``ep``, so the experts are split over another number of ranks. If there is only one process or no other
    legal grid, return the run itself.
    """
    now = run.parallel
    sizes = {axis: getattr(now, axis) for axis in AXES}
    exchanged = itertools.permutations(reversed(sizes.values()))
    merged = [{axis: now.world_size} for axis in ("z", "x", "y", "dp")]
    others = [dict(zip(AXES, order, strict=True)) for order in dict.fromkeys(exchanged)] + merged
    others = [other for other in others if other != sizes]
    candidates = [{**other, "zero": zero} for other in others for zero in (0, 3)]
    candidates += [{**sizes, "zero": zero} for zero in (0, 1, 2, 3) if zero != now.zero]
    candidates = [{**each, "ep": ep} for each in candidates for ep in _eps(run, each)]
    candidates += [{**sizes, "zero": now.zero, "ep": ep} for ep in _eps(run, sizes) if ep != now.ep]
    candidates.sort(key=lambda each: each["ep"] == now.ep)
    for candidate in candidates if now.world_size > 1 else []:
        other = run.model_copy(update={"parallel": ParallelConfig(**candidate)})
        with contextlib.suppress(UserError):
            check_layout(other)
            return other
    return run


def _eps(run: RunConfig, sizes: Mapping[str, int]) -> list[int]:
    """Return the possible values of ``ep`` on a grid with these sizes, largest first."""
    ranks = math.prod(sizes.get(axis, 1) for axis in ("dp", "cp", "z"))
    if not run.model.num_experts:
        return [1]
    return [n for n in range(ranks, 0, -1) if ranks % n == 0 and run.model.num_experts % n == 0]
