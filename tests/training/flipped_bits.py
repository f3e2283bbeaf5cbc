"""Flip single bits on one rank, in one of the two passes of a replayed step, and collect the error messages."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.parallel.data.replicated import Replicated
from fourfold.parallel.grid.grid import Grid
from fourfold.training.job import Job
from fourfold.training.replay import Replay
from fourfold.verification.batches import random_micro_batches

KINDS = ("activation", "gradient of an activation", "gradient of a weight", "summed gradient", "weight", "stale weight")
"""Where a bit flips: in a block's output, in the gradient of that output, or in a weight's gradient before or after the
sum over ranks. "weight": a weight changes between the two passes. "stale weight": a weight differs from its copies on
other ranks in both passes."""


class Trial(NamedTuple):
    kind: str
    bit: int
    rank: int
    named: tuple[int, ...]
    """The ranks that the error message names. The tuple is empty if replay found nothing."""
    sentence: str
    is_harmless: bool
    """Whether replay found nothing, and this rank's gradients equal the gradients of a healthy step."""


@dataclass
class Fault:
    """A bit that will flip on this rank."""

    kind: str = ""
    during: int = -1
    block: int = 0
    place: float = 0.0
    bit: int = 0

    def flip(self, tensor: Tensor) -> None:
        """Flip the bit, in place, and only once."""
        size, words = tensor.element_size(), tensor.detach().view(-1).view(torch.uint8)
        words[int(self.place * tensor.numel()) * size + self.bit // 8] ^= 1 << self.bit % 8
        self.during = -1


class FaultyJob:
    """A job with one flipped bit."""

    def __init__(self, run: RunConfig, patched: pytest.MonkeyPatch) -> None:
        self.job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
        self.job.initialize(0)
        self.fault, self.passes = Fault(), 0
        self.blocks = [block for stage in self.job.stages.values() for block in stage.model.blocks]
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(self._forward_hook(number))
        self.weight_hooks = 0
        for stage in self.job.stages.values():
            if isinstance(stage, Replicated):
                for parameter in [p for block in stage.model.blocks for p in block.parameters() if p.dim() == 2]:
                    parameter.register_hook(self._weight_hook(self.weight_hooks))
                    self.weight_hooks += 1
        finish, forward_backward = self.job.finish_gradients, self.job.forward_backward

        def finish_and_flip() -> None:
            finish()
            if self._is_due("summed gradient"):
                self.fault.flip(self._some_shard().grad)

        def count_passes(*args: Any) -> Tensor:
            if self._is_due("weight"):
                self._flip_weight()
            loss = forward_backward(*args)
            self.passes += 1
            return loss

        patched.setattr(self.job, "finish_gradients", finish_and_flip)
        patched.setattr(self.job, "forward_backward", count_passes)

    def _is_due(self, kind: str) -> bool:
        return self.fault.kind == kind and self.fault.during == self.passes

    def _some_shard(self) -> Any:
        shards = [shard for shard in self.job.trained if shard.local.dim() == 2 and shard.local.numel()]
        return shards[self.fault.block % len(shards)]

    def _flip_weight(self) -> None:
        self.fault.flip(self._some_shard().local)
        self.job.publish()

    def _forward_hook(self, number: int) -> Any:
        def hook(module: Any, inputs: Any, out: Tensor) -> None:
            if number != self.fault.block % len(self.blocks):
                return
            if self._is_due("activation"):
                self.fault.flip(out)
            if self._is_due("gradient of an activation") and out.requires_grad:
                out.register_hook(self._flipped)

        return hook

    def _weight_hook(self, number: int) -> Any:
        def hook(gradient: Tensor) -> Tensor | None:
            is_mine = number == self.fault.block % self.weight_hooks
            return self._flipped(gradient) if is_mine and self._is_due("gradient of a weight") else None

        return hook

    def _flipped(self, gradient: Tensor) -> Tensor:
        flipped = gradient.contiguous().clone()
        self.fault.flip(flipped)
        return flipped

    def attempt(self, fault: Fault, step: int) -> tuple[str, bool]:
        """Replay a step with a fault. Return the error message (empty if there is none) and whether the gradients are
        right."""
        weights = [shard.local.clone() for shard in self.job.shards]
        self.passes, self.fault = 0, fault
        if self._is_due("stale weight"):
            self._flip_weight()
        batches = random_micro_batches(self.job.run, step, self.job.grid, self.job.device)
        kept, sentence, gradients = self.job.count_kept(batches), "", []
        try:
            Replay(self.job).forward_backward(step, batches, kept)
            gradients = self._gradients()
        except UserError as error:
            sentence = str(error)
        self.job.optimizer.drop_gradients()
        for shard, weight in zip(self.job.shards, weights, strict=True):
            shard.local.copy_(weight)
        self.job.publish()
        if sentence:
            return sentence, False
        self.job.forward_backward(batches, kept)
        is_right = all(map(torch.equal, gradients, self._gradients()))
        self.job.optimizer.drop_gradients()
        return "", is_right

    def _gradients(self) -> list[Tensor]:
        return [shard.grad.clone() for shard in self.job.trained if shard.grad is not None]


def flip_bits(rank: int, world_size: int, run: RunConfig, kinds: tuple[str, ...], times: int) -> list[Trial]:
    """Flip ``times`` random bits of each kind, one at a time."""
    chance, bits = random.Random(run.parallel.describe()), 32
    trials = []
    with pytest.MonkeyPatch.context() as patched:
        faulty = FaultyJob(run, patched)
        for kind in kinds:
            if kind == "gradient of a weight" and not faulty.weight_hooks:
                continue
            for number in range(times):
                at, during = chance.randrange(world_size), 0 if kind == "stale weight" else chance.randrange(2)
                during = 1 if kind == "weight" else during
                fault = Fault(kind, during, chance.randrange(100), chance.random(), chance.randrange(bits))
                sentence, is_harmless = faulty.attempt(fault if rank == at else Fault(), number)
                named = tuple(int(found) for found in re.findall(r"rank (\d+) \(", sentence))
                trials.append(Trial(kind, fault.bit, at, named, sentence, is_harmless))
    return trials
