"""Parity: the layout of a run file computes what one process computes.

The model of the run file is trained for a few steps on its grid and, as plain PyTorch with stock loss, clipping and
AdamW, on rank 0 alone; both in float32, from the same weights and on the same unevenly masked random batches.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.layout import check_layout
from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import AXES, CheckpointConfig, ParallelConfig, RunConfig, SchedulerConfig
from fourfold.data.loader import MicroBatch
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import device_of
from fourfold.models.initialize import initialize
from fourfold.parallel.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.training.job import Job, build_model
from fourfold.training.optimizer import learning_rate, treatment
from fourfold.verification.batches import micro_batches_of, random_global_batch, rows_of

TOLERANCE = {"loss": 1e-5, "gradients": 1e-5, "grad_norm": 1e-5, "weights": 1e-4, "resumed": 1e-4}
"""Largest relative differences that rounding in float32 explains; the last two after steps of AdamW."""

GRADIENT_FLOOR, WEIGHT_FLOOR = 1e-4, 1e-3
"""A tensor that is smaller than this share of the largest is compared with that share: a tensor that is zero in theory,
such as the gradient of a key bias, has no relative error."""

ADAM_EPS = 1e-5
"""Adam divides by √v + eps. Some gradients are zero in theory (key biases) or nearly so, and with a smaller eps
rounding noise would move their weights by whole steps, differently on any two machines."""

MAX_LR = 3e-4
"""The effect of rounding on a weight grows with the learning rate, and says nothing about the layout."""


@dataclass(frozen=True)
class ParityReport:
    """Largest relative differences between the grid and one process, and those of every gradient by name."""

    loss: float
    gradients: float
    grad_norm: float
    weights: float
    resumed: float
    each_gradient: dict[str, float]
    resumed_on: str

    @property
    def ok(self) -> bool:
        return all(getattr(self, name) <= limit for name, limit in TOLERANCE.items())

    def record(self) -> dict[str, bool | float]:
        """The report as JSON values."""
        return {"ok": self.ok, **{name: getattr(self, name) for name in TOLERANCE}}


def parity_of_place(place: Place, run: RunConfig, steps: int) -> ParityReport | None:
    """Run ``parity`` as a process of a job."""
    return parity(run, device_of(place, run.training.device), steps)


def parity(run: RunConfig, device: torch.device, steps: int = 3) -> ParityReport | None:
    """Compare the grid with one process; every process of the grid calls this, and rank 0 gets the report.

    "resumed": the job is saved after ``steps``, loaded on another grid of the same size, and takes one more step.
    """
    run = in_float32(run)
    grid = Grid(run.parallel, device.type)
    job = Job(run, grid, device)
    job.initialize(run.training.seed)
    one = OneProcess(run, device) if dist.get_rank() == 0 else None
    worst = dict.fromkeys(TOLERANCE, 0.0)
    each_gradient: dict[str, float] = {}

    for step in range(steps):
        batch = random_global_batch(run, step)
        loss, norm, gradients = _grid_step(job, batch, step, wants_gradients=step == 0)
        if one is not None:
            expected_loss, expected_norm, expected_gradients = one.step(batch, step)
            if gradients is not None:
                each_gradient = relative_differences(gradients, expected_gradients, GRADIENT_FLOOR)
            worst["loss"] = max(worst["loss"], _relative(loss, expected_loss))
            worst["grad_norm"] = max(worst["grad_norm"], _relative(norm, expected_norm))
    weights = gather_full(job.shards, [shard.local for shard in job.shards])
    if one is not None and weights is not None:
        worst["weights"] = max(relative_differences(weights, one.weights(), WEIGHT_FLOOR).values())

    other = resharded(run)
    resumed = _resume_elsewhere(job, other, steps)
    batch = random_global_batch(run, steps)
    loss, norm, _ = _grid_step(resumed, batch, steps, wants_gradients=False)
    weights_after = gather_full(resumed.shards, [shard.local for shard in resumed.shards])
    if one is None or weights_after is None:
        return None
    expected_loss, expected_norm, _ = one.step(batch, steps)
    worst["resumed"] = max(
        _relative(loss, expected_loss),
        _relative(norm, expected_norm),
        max(relative_differences(weights_after, one.weights(), WEIGHT_FLOOR).values()),
    )
    worst["gradients"] = max(each_gradient.values())
    return ParityReport(**worst, each_gradient=each_gradient, resumed_on=other.parallel.describe())


class OneProcess:
    """The reference: the same model in plain PyTorch, with torch's own loss, clipping and AdamW."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.model = build_model(run).to(device)
        initialize(self.model, run.model, run.training.seed)
        groups = [
            {"params": [p], **treatment(name, p.ndim, run.optimizer)._asdict()}
            for name, p in self.model.named_parameters()
        ]
        self.adamw = torch.optim.AdamW(groups, betas=run.optimizer.betas, eps=run.optimizer.eps)

    def step(self, batch: MicroBatch[Tensor], step: int) -> tuple[float, float, dict[str, Tensor]]:
        """Loss, gradient norm and unclipped gradients of one training step."""
        run = self.run
        assert batch.labels is not None
        kept = (batch.labels != IGNORE_INDEX).sum()
        loss = 0.0
        for first in range(0, len(batch.tokens), run.training.micro_batch_size):
            part = rows_of(batch, slice(first, first + run.training.micro_batch_size), self.device)
            part_loss = self.model(part.tokens, part.labels, part.positions, part.documents) / kept
            part_loss.backward()
            loss += part_loss.item()
        gradients = {name: p.grad.clone().cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), run.optimizer.max_grad_norm).item()
        for group in self.adamw.param_groups:
            rate = learning_rate(step, run.training.train_steps, run.optimizer.lr, run.lr_scheduler)
            group["lr"] = rate * group["lr_ratio"]
        self.adamw.step()
        self.adamw.zero_grad()
        return loss, norm, gradients

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.model.named_parameters()}


def in_float32(run: RunConfig) -> RunConfig:
    """The run as parity runs it."""
    exact = {"precision": "fp32", "master_weights": "fp32", "reduce_dtype": "fp32", "float8": "none", "compile": False}
    return run.model_copy(
        update={
            "training": run.training.model_copy(update=exact),
            "optimizer": run.optimizer.model_copy(
                update={"eps": max(run.optimizer.eps, ADAM_EPS), "lr": min(run.optimizer.lr, MAX_LR)}
            ),
            # In a warm-up the weights would hardly move, and an optimizer that does nothing would pass.
            "lr_scheduler": SchedulerConfig(decay_style="constant"),
        }
    )


def resharded(run: RunConfig) -> RunConfig:
    """The same run on another grid of as many processes: axes exchanged, else merged, else another ``zero``.

    One process has no other grid.
    """
    now = run.parallel
    sizes = {axis: getattr(now, axis) for axis in AXES}
    exchanged = itertools.permutations(reversed(sizes.values()))
    merged = [{axis: now.world_size} for axis in ("z", "x", "y", "dp")]
    others = [dict(zip(AXES, order, strict=True)) for order in dict.fromkeys(exchanged)] + merged
    others = [other for other in others if other != sizes]
    candidates = [{**other, "zero": zero} for other in others for zero in (0, 3)]
    candidates += [{**sizes, "zero": zero} for zero in (0, 1, 2, 3) if zero != now.zero]
    for candidate in candidates if now.world_size > 1 else []:
        other = run.model_copy(update={"parallel": ParallelConfig(**candidate)})
        with contextlib.suppress(UserError):
            check_layout(other)
            return other
    return run


def relative_differences(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor_share: float
) -> dict[str, float]:
    """Each tensor's largest difference over its largest value, or over ``floor_share`` of the largest of all."""
    assert got.keys() == expected.keys(), f"parameters differ: {got.keys() ^ expected.keys()}"
    floor = floor_share * max(tensor.abs().max().item() for tensor in expected.values())
    return {
        name: (got[name] - tensor).abs().nan_to_num(nan=torch.inf).max().item() / max(tensor.abs().max().item(), floor)
        for name, tensor in expected.items()
    }


def _grid_step(
    job: Job, batch: MicroBatch[Tensor], step: int, wants_gradients: bool
) -> tuple[float, float, dict[str, Tensor] | None]:
    """One step of the job; its gradients before clipping, whole, on rank 0."""
    micro_batches = micro_batches_of(batch, job.run, job.grid, job.device)
    if not wants_gradients:
        result = job.train_step(micro_batches, step)
        return result.loss.item(), result.grad_norm.item(), None
    kept = job.count_kept(micro_batches)
    loss = job.forward_backward(micro_batches, kept)
    gradients = gather_full(job.trained, [shard.grad for shard in job.trained if shard.grad is not None])
    norm = job.clip()
    job.update(step, norm)
    return loss.item(), norm.item(), gradients


def _resume_elsewhere(job: Job, other: RunConfig, step: int) -> Job:
    """Save ``job``, and load it on the grid of ``other``."""
    folder = Path(job.run.output_dir) / f".parity-{job.run.name}"
    Checkpointer(folder, job, CheckpointConfig()).save(step)
    resumed = Job(other, Grid(other.parallel, job.device.type), job.device)
    if other.lora.rank:  # checkpoints of LoRA hold only the adapters
        resumed.initialize(other.training.seed)
    load_checkpoint(folder / f"step_{step}", resumed)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return resumed


def _relative(got: float, expected: float) -> float:
    return abs(got - expected) / abs(expected) if got == got else float("inf")
