"""Take a few training steps on one device, and measure how much the results of two devices differ."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from tiny_runs import tiny_run
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.process_group import end_process_group, start_process_group
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches

CPU = torch.device("cpu")
PACKED = {"data": {"source": "python-stdlib", "mask_documents": True}}
WIDE = {
    "preset": "llama-tiny",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "vocab_size": 4099,
}
"""Sizes of a model for GPU kernels: heads of 64 channels, four query heads per key-value head, and an odd
vocabulary."""


@dataclass(frozen=True)
class Steps:
    """The results of some steps, on the CPU in float64."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """The gradients of the first step."""


def wide(device: torch.device) -> dict[str, Any]:
    """Return a wide model on a GPU, or a small model of the same shape on a CPU."""
    small = {"hidden_size": 64, "head_dim": 8, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 257}
    return WIDE if device.type == "cuda" else WIDE | small


def length(device: torch.device, tokens: int) -> int:
    """Return the number of tokens for a device. On a CPU it is a tenth of ``tokens``, as a multiple of 16."""
    return tokens if device.type == "cuda" else tokens // 160 * 16


def run_on(device: torch.device, model: dict[str, Any], precision: str = "fp32", **sections: Any) -> RunConfig:
    training = {"precision": precision, "device": device.type, **sections.pop("training", {})}
    return tiny_run(model, training=training, **sections)


def long_sequences(device: torch.device, tokens: int, **training: Any) -> dict[str, Any]:
    """Return settings for four micro-batches of one sequence of this length. One of them has no labels, and another has
    all labels."""
    return {"seq_length": length(device, tokens), "global_batch_size": 4, "micro_batch_size": 1, **training}


@contextlib.contextmanager
def job_on(device: torch.device, run: RunConfig) -> Iterator[Job]:
    """Start a job of one process the way the program starts it, with NCCL on a GPU."""
    start_process_group(Place(0, 0, 1, 1, launcher="local"), None, device, timedelta(minutes=5))
    try:
        job = Job(run, Grid(run.parallel, device.type), device)
        job.initialize(0)
        yield job
    finally:
        torch._dynamo.reset()
        end_process_group(failed=False)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def steps_on(device: torch.device, run: RunConfig, steps: int = 2) -> Steps:
    """Train from the run's initial weights on random tokens, which are the same on every device."""
    losses, norms, gradients = [], [], {}
    with job_on(device, run) as job:
        for step in range(steps):
            batches = random_micro_batches(run, step, job.grid, device)
            loss = job.forward_backward(batches, job.count_kept(batches))
            if step == 0:
                factor = 1.0 if job.loss_scale is None else job.loss_scale.scale
                trained = [shard for shard in job.trained if shard.grad is not None]
                gradients = {shard.name: shard.grad.detach().double().cpu() / factor for shard in trained}
            norms.append(float(job.clip()))
            job.update(step, norms[-1])
            losses.append(float(loss))
    return Steps(losses, norms, gradients)


@dataclass(frozen=True)
class Distance:
    """Relative 2-norms of the differences between gradients: the largest, its name, and the root mean square."""

    worst: float
    name: str
    rms: float


def distance(found: Steps, expected: Steps) -> Distance:
    assert found.gradients.keys() == expected.gradients.keys()
    each = {
        name: float((found.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.gradients.items()
        if gradient.norm() > 0
    }
    not_finite = [name for name, value in each.items() if not math.isfinite(value)]
    assert not not_finite, f"gradients are not finite: {not_finite[:5]}"
    name = max(each, key=lambda name: each[name])
    return Distance(each[name], name, math.sqrt(sum(value**2 for value in each.values()) / len(each)))


def losses_apart(found: Steps, expected: Steps) -> float:
    """Return the largest relative difference between the losses of two runs."""
    assert all(map(math.isfinite, found.losses)), found.losses
    return max(abs(a / b - 1) for a, b in zip(found.losses, expected.losses, strict=True))
