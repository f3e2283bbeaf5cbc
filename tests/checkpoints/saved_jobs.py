"""Train and save small jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoints.checkpoint import Checkpointer
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")


def new_job(run: RunConfig, initialized: bool = True) -> Job:
    job = Job(run, Grid(run.parallel, "cpu"), CPU)
    job.initialize(run.training.seed if initialized else 99)
    return job


def train(job: Job, steps: range) -> list[float]:
    """Train, and return the losses."""
    losses = []
    for step in steps:
        batch = random_micro_batches(job.run, step, job.grid, CPU)
        losses.append(job.train_step(batch, step).loss.item())
    return losses


def save(job: Job, folder: Path, step: int, **config: Any) -> Path:
    Checkpointer(folder, job, CheckpointConfig(**config)).save(step)
    return folder / f"step_{step}"


def tensors_of(job: Job) -> list[Tensor]:
    """Return everything on this process that a checkpoint must restore."""
    moments = [m for i in range(len(job.shards)) for m in job.optimizer.moments(i).values()]
    counts = [job.optimizer.adamw.state[p]["step"] for p in job.optimizer.parameters]
    scale = job.loss_scale
    numbers = [] if scale is None else [torch.tensor([scale.scale, scale.steps_since_change])]
    return [tensor.clone() for tensor in [*(s.local for s in job.shards), *moments, *counts, *numbers]]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
