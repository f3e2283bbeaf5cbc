"""AdamW on local shards, and the learning-rate schedule."""

from __future__ import annotations

import difflib
import fnmatch
import math
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fourfold.config.run import OptimizerConfig, ParameterGroup, SchedulerConfig
from fourfold.errors import UserError
from fourfold.parallel.state import LocalShard


class Treatment(NamedTuple):
    """The settings of the optimizer for one parameter."""

    lr_ratio: float
    """Its learning rate, relative to the run's."""
    weight_decay: float


def treatment(name: str, dims: int, config: OptimizerConfig) -> Treatment:
    """The settings for a parameter: those of the first group of the run file that names it, else the run's own."""
    decay = config.weight_decay if dims > 1 else 0.0
    for group in config.groups:
        if _matches(group, name):
            return Treatment(group.lr_ratio, decay if group.weight_decay is None else group.weight_decay)
    return Treatment(1.0, decay)


def check_groups(config: OptimizerConfig, names: Collection[str]) -> None:
    """Raise ``UserError`` for a group that names no trained parameter, or only parameters of earlier groups."""
    left = list(names)
    for group in config.groups:
        for pattern in group.parameters:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
                raise UserError(f"optimizer.groups: '{pattern}' names no parameter that is trained; {near[0]} is one")
        others = [name for name in left if not _matches(group, name)]
        if len(others) == len(left):
            raise UserError(
                f"optimizer.groups: every parameter of {', '.join(group.parameters)} is in an earlier group; put the "
                "narrower one first"
            )
        left = others


def _matches(group: ParameterGroup, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in group.parameters)


class ShardedAdamW:
    """torch's AdamW over the plain local tensors behind FSDP2's parameters.

    On DTensors every operation of every step would be dispatched through Python, and the first step would compile a
    sharding strategy for each.
    """

    def __init__(self, shards: Sequence[LocalShard], config: OptimizerConfig, seed: int = 0) -> None:
        """seed: for stochastic rounding, which rounds all replicas of a weight the same way."""
        self.shards, self.config, self.seed = list(shards), config, seed
        self._steps = 0  # AdamW counts in tensors, which the trace on fake tensors cannot read
        # As they are stored: fused kernels go through the memory of weight, gradient and moments in one order.
        self.parameters = [
            nn.Parameter(shard.tile.as_tile(shard.local), requires_grad=shard.parameter.requires_grad)
            for shard in shards
        ]
        self.treatments = [treatment(shard.name, len(shard.global_shape), config) for shard in self.shards]
        groups = [
            {
                "params": [p for p, own in zip(self.parameters, self.treatments, strict=True) if own == each],
                "weight_decay": each.weight_decay,
                "lr_ratio": each.lr_ratio,
            }
            for each in dict.fromkeys(self.treatments)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, lr: float) -> None:
        """Update the weights with the gradients that the shards hold, then drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            # The memory that is updated must be the memory that the model (or FSDP2's all-gather) reads.
            assert _same_memory(shard.current, parameter), f"{shard.name} has moved"
            gradient = None if shard.grad is None else shard.tile.as_tile(shard.grad)
            # A gradient in another dtype (a float32 sum for bf16 weights) is applied in the weights' dtype.
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype).contiguous()
        self._steps += 1
        if self.config.stochastic_rounding:
            self._step_and_round(lr)
        else:
            self.adamw.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients of model and optimizer."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.grad = shard.parameter.grad = None

    @torch.no_grad()
    def _step_and_round(self, lr: float) -> None:
        """Step float32 copies of the weights, one at a time, and round the results to bfloat16."""
        beta1, beta2 = self.config.betas
        for index, (parameter, shard) in enumerate(zip(self.parameters, self.shards, strict=True)):
            if shard.grad is None:
                continue
            first, second = (shard.tile.as_tile(moment) for moment in self.moments(index).values())
            count = self.adamw.state[parameter]["step"]
            wide, grad = parameter.float(), shard.tile.as_tile(shard.grad).float().contiguous()
            adamw(
                *([wide], [grad], [first], [second], [], [count]),
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr * self.treatments[index].lr_ratio,
                weight_decay=self.treatments[index].weight_decay,
                eps=self.config.eps,
                maximize=False,
            )
            generator = torch.Generator(wide.device)
            # Seeded by name: the copies of a tied weight at both ends of a pipeline are rounded the same way too.
            name = zlib.crc32(shard.name.encode())
            generator.manual_seed(((self.seed * 1_000_003 + self._steps) * 1_000_003 + name) % 2**63)
            parameter.copy_(stochastically_rounded(wide, generator))

    def moments(self, index: int) -> dict[str, Tensor]:
        """First and second moment of shard ``index``, as its ``local``; zeros before the first step."""
        parameter = self.parameters[index]
        state = self.adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            dtype = torch.float32 if self.config.stochastic_rounding else parameter.dtype
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return {name: self.shards[index].tile.as_tile(state[name]) for name in ("exp_avg", "exp_avg_sq")}

    def steps_taken(self) -> int:
        """Steps that changed the weights."""
        state = self.adamw.state[self.parameters[0]]
        return int(state["step"]) if state else 0

    def set_steps_taken(self, steps: int) -> None:
        """Set the steps that Adam's bias correction counts, after loading moments."""
        self._steps = steps
        for index, parameter in enumerate(self.parameters):
            self.moments(index)
            self.adamw.state[parameter]["step"].fill_(steps)


def stochastically_rounded(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down with probabilities whose mean is the float32.

    bfloat16 is the upper half of a float32: uniform noise added to the lower half carries into the upper half with a
    probability proportional to the lower half.
    """
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device, generator=generator)
    upper = (wide.view(torch.int32) + noise) & -(1 << 16)
    return upper.view(torch.float32).bfloat16()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def learning_rate(step: int, train_steps: int, peak: float, config: SchedulerConfig) -> float:
    """The rate at a step, counted from 0: linear warm-up to ``peak``, then decay to peak · min_lr_ratio at the last."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_style == "wsd":
        falling_steps = max(1.0, min(config.decay_ratio * train_steps, train_steps - config.warmup_steps))
        progress = 1 - (train_steps - 1 - step) / falling_steps
    else:
        progress = (step - config.warmup_steps) / max(1, train_steps - 1 - config.warmup_steps)
    progress = min(max(progress, 0.0), 1.0)
    falling = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - progress,
    }[config.decay_style]
    floor = config.min_lr_ratio
    return peak * (1.0 if config.decay_style == "constant" else floor + (1 - floor) * falling)
