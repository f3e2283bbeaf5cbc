"""Runs with bad gradients or a bad loss in chosen steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.loader import Loader, MicroBatch
from fourfold.environment import Place
from fourfold.training import trainer
from fourfold.training.job import Job
from fourfold.training.outcome import Outcome

NAN_GRADIENT, NAN_LOSS, NAN_AFTER_SUM = "NaN gradient", "NaN loss", "NaN loss on one rank"
LARGE_LOSS, LARGE_GRADIENT, KILL = "large loss", "large gradient", "kill"


class Killed(Exception):
    """Simulates the kill of a process: it leaves the same files."""


def poison(patched: pytest.MonkeyPatch, faults: Mapping[int, str], on_this_rank: bool = True) -> None:
    """Make the loss or gradients of some steps bad, whenever the batch of the step is trained. Steps are counted from
    1."""
    current = [0]
    assemble, clip, mean_loss = Loader.step, Job.clip, Job.mean_loss

    def step(loader: Loader, number: int) -> list[MicroBatch]:
        current[0] = number + 1
        if faults.get(number + 1) == KILL:
            raise Killed
        return assemble(loader, number)

    def clip_poisoned(job: Job) -> Tensor:
        grads = [shard.grad for shard in job.trained if shard.grad is not None and shard.grad.numel()]
        if on_this_rank and faults.get(current[0]) == NAN_GRADIENT:
            grads[0].view(-1)[0] = torch.nan
        if on_this_rank and faults.get(current[0]) == LARGE_GRADIENT:
            grads[0].view(-1)[0] = 1e6
        return clip(job)

    def mean_of_poisoned(job: Job, losses: list[Tensor], kept: Tensor) -> Tensor:
        fault = faults.get(current[0])
        if fault in (LARGE_LOSS, NAN_LOSS):
            losses = [loss * (20 if fault == LARGE_LOSS else torch.nan) for loss in losses]
        mean = mean_loss(job, losses, kept)
        return mean * torch.nan if fault == NAN_AFTER_SUM and on_this_rank else mean

    patched.setattr(Loader, "step", step)
    patched.setattr(Job, "clip", clip_poisoned)
    patched.setattr(Job, "mean_loss", mean_of_poisoned)


def train_poisoned(rank: int, world_size: int, run: RunConfig, faults: Mapping[int, str]) -> Outcome:
    """Train a run that goes bad on its last rank."""
    with pytest.MonkeyPatch.context() as patched:
        poison(patched, faults, rank == world_size - 1)
        return trainer.train(Place(rank, rank, world_size, world_size, "local"), run)


def train_without(rank: int, world_size: int, run: RunConfig, left_out: set[int]) -> Outcome:
    """Train a healthy run whose optimizer never sees the gradients of some steps."""
    update = Job.update

    def update_others(job: Job, step: int, grad_norm: Tensor) -> bool:
        return job.skip_update() if step + 1 in left_out else update(job, step, grad_norm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Job, "update", update_others)
        return trainer.train(Place(rank, rank, world_size, world_size, "local"), run)


def tensors_at(run: RunConfig, step: int) -> dict[tuple[str, str], Tensor]:
    """Return the weights and moments of a checkpoint, by file and name."""
    folder = Path(run.output_dir, run.name, "checkpoints", f"step_{step}")
    found = {(file.name, name): t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert found
    return found


def same_tensors(some: dict[tuple[str, str], Tensor], others: dict[tuple[str, str], Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[key]) for key, tensor in some.items())
