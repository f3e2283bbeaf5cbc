"""Update this process's shards with AdamW, Lion, or Muon, and compute the learning rate. Before each update,
``parallel.state`` clips the gradients."""

import difflib
import fnmatch
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fourfold.config.optimizer_rules import STATES, OptimizerConfig, ParameterGroup, UpdateRule, is_matrix, rule_of
from fourfold.config.run import RunConfig, SchedulerConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import LocalShard
from fourfold.training.newton_schulz import orthogonalize, update_scale
from fourfold.training.owned_matrices import Matrix, OwnedMatrices


class Treatment(NamedTuple):
    """The optimizer settings of one parameter."""

    lr_ratio: float
    """Factor on the run's learning rate."""
    weight_decay: float


def treatment(name: str, dims: int, config: OptimizerConfig) -> Treatment:
    """Return the optimizer settings of a parameter.

    The settings come from the first entry of ``optimizer.groups`` that names the parameter, or from [optimizer] if no
    entry names it. If no entry sets a weight decay, only matrices have one.

    Args:
        name: Name of the parameter.
        dims: Number of dimensions of the parameter.
        config: The section [optimizer] of the run file.
    """
    decay = config.weight_decay if is_matrix(name, dims) else 0.0
    for group in config.groups:
        if _matches(group, name):
            return Treatment(group.lr_ratio, decay if group.weight_decay is None else group.weight_decay)
    return Treatment(1.0, decay)


def check_groups(config: OptimizerConfig, names: Collection[str]) -> None:
    """Check that every parameter group of the optimizer has an effect.

    Raises:
        UserError: A pattern of a group matches no trained parameter, or all parameters of a group are in earlier
            groups.
    """
    left = list(names)
    for group in config.groups:
        for pattern in group.parameters:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
                raise UserError(
                    f"optimizer.groups: '{pattern}' names no trained parameter; {near[0]} is a trained parameter"
                )
        others = [name for name in left if not _matches(group, name)]
        if len(others) == len(left):
            raise UserError(
                f"optimizer.groups: every parameter of {', '.join(group.parameters)} is in an earlier group; put the "
                "narrower group first"
            )
        left = others


def _matches(group: ParameterGroup, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in group.parameters)


class ShardedOptimizer:
    """AdamW or Lion for all parameters, or Muon for matrices and AdamW for everything else.

    The class updates the plain local tensors behind FSDP2's parameters. The parameters themselves are DTensors, and
    updating these would be slow. Python would dispatch each operation, and each operation would need a sharding
    strategy in the first step.

    Args:
        shards: This process's shards of the weights to train.
        run: The run's settings, such as the section [optimizer], the seed, and the precision.
        grid: The grid of processes.
    """

    def __init__(self, shards: Sequence[LocalShard], run: RunConfig, grid: Grid) -> None:
        self.shards, self.config, self.seed = list(shards), run.optimizer, run.training.seed
        # Count the steps here too. AdamW counts them in tensors, which have no data in ``fourfold trace``.
        self._steps = 0
        # Keep the memory order of each weight, because fused kernels visit weight, gradient, and moments in the same
        # order.
        self.parameters = [
            nn.Parameter(shard.tile.as_tile(shard.local), requires_grad=shard.parameter.requires_grad)
            for shard in shards
        ]
        config = self.config
        self.treatments = [treatment(shard.name, len(shard.global_shape), config) for shard in self.shards]
        self.rules: list[UpdateRule] = [
            rule_of(shard.name, len(shard.global_shape), config.name) for shard in self.shards
        ]
        matrices = {i: shard for i, shard in enumerate(self.shards) if self.rules[i] == "muon"}
        self._matrices = OwnedMatrices(matrices, grid, run.overlap.shards_per_node) if config.name == "muon" else None
        self._products = torch.float32 if run.training.precision == "fp32" else torch.bfloat16
        """The dtype of Muon's matmuls."""
        self._momentum: dict[int, Tensor] = {}
        """The running mean of the gradient of each shard that Lion or Muon updates, by the shard's index. The mean has
        the memory layout of the parameter."""
        members = list(zip(self.parameters, self.treatments, self.rules, strict=True))
        groups = [
            {
                "params": [p for p, own, rule in members if (own, rule) == (each, "adamw")],
                "weight_decay": each.weight_decay,
                "lr_ratio": each.lr_ratio,
            }
            for each in dict.fromkeys(self.treatments)
        ]
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, lr: float) -> None:
        """Update the weights with the gradients of the shards, then drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_ratio"]
        for parameter, shard, rule in zip(self.parameters, self.shards, self.rules, strict=True):
            # The model (or FSDP2's all-gather) must read the same memory that the optimizer updates.
            assert _same_memory(shard.current, parameter), f"{shard.name} has moved"
            if rule == "adamw" and shard.grad is not None and not self.config.stochastic_rounding:
                # AdamW's kernel needs the gradient in the weight's dtype. So convert the gradient, and free the
                # original.
                parameter.grad = shard.tile.as_tile(shard.grad).to(parameter.dtype).contiguous()
                shard.parameter.grad = None
        self._steps += 1
        if self.config.stochastic_rounding:
            self._step_and_round(lr)
        else:
            self.adamw.step()
        for index in self._of_rule("lion"):
            self._step_lion(index, lr)
        if self._matrices is not None:
            self._step_muon(self._matrices, lr)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients of the model and of the optimizer."""
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.grad = shard.parameter.grad = None

    def _of_rule(self, rule: UpdateRule) -> Iterator[int]:
        """Yield the index of each shard that has a gradient and that ``rule`` updates."""
        for index, shard in enumerate(self.shards):
            if self.rules[index] == rule and shard.grad is not None:
                yield index

    @torch.no_grad()
    def _step_lion(self, index: int, lr: float) -> None:
        """Update one shard with Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

        Lion updates with the sign of the interpolated momentum u. Here, u / eps replaces the sign if u is between -eps
        and eps. Without this rule, a gradient that is only rounding error would move its weight by a full step.
        """
        beta1, beta2 = self.config.betas
        mean, grad = self._mean(index), self._gradient(Matrix(index))
        update = grad.lerp(mean, beta1)
        update /= update.abs().clamp_(min=self.config.eps)
        mean.lerp_(grad, 1 - beta2)
        self._apply(Matrix(index), update, lr, 1.0)

    @torch.no_grad()
    def _step_muon(self, matrices: OwnedMatrices, lr: float) -> None:
        """Update the matrices with Muon and Nesterov momentum (Jordan 2024). The updates are scaled as in arXiv
        2502.16982."""
        momentum = self.config.momentum
        for index in self._of_rule("muon"):
            self._mean(index).lerp_(self._gradient(Matrix(index)), 1 - momentum)

        def ahead(matrix: Matrix) -> Tensor:
            mean = _matrix_of(self._mean(matrix.shard), matrix)
            return self._gradient(matrix).lerp(mean, momentum).to(self._products)

        def take(matrix: Matrix, update: Tensor) -> None:
            self._apply(matrix, update, lr, update_scale(self.shards[matrix.shard].global_shape))

        empty = torch.empty(0, dtype=self._products, device=self.parameters[0].device)
        matrices.transform(ahead, orthogonalize, take, empty)

    def _gradient(self, matrix: Matrix) -> Tensor:
        """Return the gradient of a shard or of one of its experts, in the dtype of the running mean."""
        shard = self.shards[matrix.shard]
        assert shard.grad is not None, f"{shard.name} has no gradient"
        return _matrix_of(shard.grad, matrix).to(self._mean(matrix.shard).dtype)

    def _apply(self, matrix: Matrix, update: Tensor, lr: float, scale: float) -> None:
        """Apply weight decay to a shard or to one of its experts, and subtract lr · scale · ``update``."""
        parameter, own = self._weight(matrix), self.treatments[matrix.shard]
        rounds = self.config.stochastic_rounding
        wide = parameter.float() if rounds else parameter
        rate = lr * own.lr_ratio
        wide.mul_(1 - rate * own.weight_decay).sub_(update, alpha=rate * scale)
        if rounds:
            self._round(matrix, wide)

    def _weight(self, matrix: Matrix) -> Tensor:
        """Return the weight of a shard or of one of its experts, in the shape of the tile (see ``Tile.as_tile``)."""
        tile = self.shards[matrix.shard].tile
        return _matrix_of(tile.as_tile(self.parameters[matrix.shard].detach()), matrix)

    @torch.no_grad()
    def _step_and_round(self, lr: float) -> None:
        """Update bfloat16 weights with AdamW and stochastic rounding.

        The method updates a float32 copy of one weight at a time, and rounds the result to bfloat16.
        """
        beta1, beta2 = self.config.betas
        for index in self._of_rule("adamw"):
            parameter, shard = self.parameters[index], self.shards[index]
            assert shard.grad is not None
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
            self._round(Matrix(index), shard.tile.as_tile(wide))

    def _round(self, matrix: Matrix, wide: Tensor) -> None:
        """Round a float32 copy of a weight stochastically, and store the result in the weight."""
        generator = torch.Generator(wide.device)
        # Derive the seed from the name. In a pipeline, a tied weight has two copies with the same name, which must be
        # rounded the same way.
        expert = "" if matrix.expert is None else f"[{matrix.expert}]"
        name = zlib.crc32(f"{self.shards[matrix.shard].name}{expert}".encode())
        generator.manual_seed(((self.seed * 1_000_003 + self._steps) * 1_000_003 + name) % 2**63)
        self._weight(matrix).copy_(stochastically_rounded(wide, generator))

    def moments(self, index: int) -> dict[str, Tensor]:
        """Return the optimizer states of the shard with this index, by name. They have the shape of the shard's
        local tensor, and are 0 before the first step."""
        parameter, names = self.parameters[index], STATES[self.rules[index]]
        if self.rules[index] != "adamw":
            return {name: self._mean(index) for name in names}
        state = self.adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in names:
                state[name] = self._zeros(parameter)
        return {name: self.shards[index].tile.as_tile(state[name]) for name in names}

    def _mean(self, index: int) -> Tensor:
        """Return the running mean of the gradient of a shard that Lion or Muon updates, in the shape of the shard's
        tile (see ``Tile.as_tile``)."""
        if index not in self._momentum:
            self._momentum[index] = self._zeros(self.parameters[index])
        return self.shards[index].tile.as_tile(self._momentum[index])

    def _zeros(self, parameter: Tensor) -> Tensor:
        dtype = torch.float32 if self.config.stochastic_rounding else parameter.dtype
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    def states(self) -> Iterator[Tensor]:
        """Yield every tensor that is kept between steps, including AdamW's step counts."""
        for state in self.adamw.state.values():
            yield from state.values()
        yield from self._momentum.values()

    def steps_taken(self) -> int:
        """Return the number of steps that changed the weights."""
        return self._steps

    def set_steps_taken(self, steps: int) -> None:
        """Set the number of steps that changed the weights. AdamW's bias correction uses this number. Call this after a
        checkpoint is loaded."""
        self._steps = steps
        for index, parameter in enumerate(self.parameters):
            self.moments(index)
            if self.rules[index] == "adamw":
                self.adamw.state[parameter]["step"].fill_(steps)


def _matrix_of(stack: Tensor, matrix: Matrix) -> Tensor:
    return stack if matrix.expert is None else stack[matrix.expert]


def stochastically_rounded(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16 at random, up or down, so that the expected value is the float32 value.

    A bfloat16 is the upper 16 bits of a float32. This function adds uniform noise to the lower 16 bits. A carry into
    the upper bits rounds up. The probability of a carry is proportional to the value of the lower bits.
    """
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device, generator=generator)
    upper = (wide.view(torch.int32) + noise) & -(1 << 16)
    return upper.view(torch.float32).bfloat16()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()


def learning_rate(step: int, train_steps: int, peak: float, config: SchedulerConfig) -> float:
    """Return the learning rate of a step.

    The rate rises linearly to ``peak`` in the warm-up. Then it decays to ``peak`` · ``min_lr_ratio`` at the last step,
    unless ``decay_style`` is "constant". "wsd" first holds ``peak``, and decays only in the last part of the run. The
    length of this part is ``decay_ratio`` times the number of steps.

    Args:
        step: Index of the step. The first step is 0.
        train_steps: Number of steps in the whole run.
        peak: The learning rate at the end of the warm-up.
        config: The section [lr_scheduler] of the run file.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_style == "constant":
        return peak
    if config.decay_style == "wsd":
        falling_steps = max(1.0, min(config.decay_ratio * train_steps, train_steps - config.warmup_steps))
        progress = 1 - (train_steps - 1 - step) / falling_steps
    else:
        progress = (step - config.warmup_steps) / max(1, train_steps - 1 - config.warmup_steps)
    progress = min(max(progress, 0.0), 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay_style == "cosine" else 1 - progress
    floor = config.min_lr_ratio
    return peak * (floor + (1 - floor) * falling)
