"""Data parallelism with a full copy of the weights on every rank. Gradients are summed over the ranks during the
backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from fourfold.parallel.data.data_parallel import DataParallel, StepTypes, Units
from fourfold.parallel.grid.communicate import Pending, start_all_reduce
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.state import LocalShard, replicas_of_tile
from fourfold.parallel.tensor.sharding import Tile


class Replicated(DataParallel):
    """Keeps a full copy of the weights on every rank. This requires z = 1, and either ``zero`` = 0 or dp·cp = 1.

    If the dtype of the step differs from the dtype of the stored weights, the model computes with working copies of the
    weights. The optimizer updates the stored weights.
    """

    def __init__(self, model: nn.Module, units: Units, grid: Grid, types: StepTypes) -> None:
        super().__init__(model, units, grid, types)
        # Remember each parameter's dtype. With LoRA, the dtypes differ, because frozen weights are stored in the step's
        # dtype.
        self._stored_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        model.to(types.working)
        self.weights: dict[nn.Parameter, Weight] = {}
        self._buckets: list[Bucket] = []

    def materialize(self, device: torch.device) -> None:
        super().materialize(device)
        for name, working in self.model.named_parameters():
            stored, dtype = working, self._stored_dtypes[name]
            if working.dtype != dtype:
                stored = nn.Parameter(torch.empty_like(working, dtype=dtype), working.requires_grad)
            summed = working if working.dtype == self.types.reduced else stored
            if summed.requires_grad:
                # With this setting, autograd casts each micro-batch's gradient to the reduced dtype.
                summed.grad_dtype = self.types.reduced
            self.weights[working] = Weight(working, stored, summed)
        of_experts = self.split_experts()
        for parameters in _in_order_of_the_backward(self.model, self.units):
            trained = [p for p in parameters if p.requires_grad]
            for replicas, mine in (
                (self.grid.expert_replicas, [p for p in trained if p in of_experts]),
                (self.grid.replicas, [p for p in trained if p not in of_experts]),
            ):
                if mine:
                    self._buckets.append(Bucket([self.weights[p] for p in mine], replicas, self.types.reduced))

    def shard(self, name: str, parameter: nn.Parameter, tile: Tile) -> LocalShard:
        stored = self.weights[parameter].stored
        local = tile.as_tile(stored.detach())
        shape = tile.global_shape(tuple(local.shape), self.grid)
        over_tokens = self.grid.replicas if tile.ep is None else self.grid.expert_replicas
        replicas = replicas_of_tile(tile, self.grid) * over_tokens.size
        return LocalShard(name, stored, local, tile, shape, tile.slices(shape, self.grid), replicas)

    def begin_backward(self, last: bool) -> None:
        for bucket in self._buckets:
            bucket.begin_backward(last)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        super().add_gradient(parameter, gradient)
        self.weights[parameter].keep_gradient()

    def finish_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.start()
        for bucket in self._buckets:
            bucket.wait()
        for weight in self.weights.values():
            weight.finish_gradient()

    @torch.no_grad()
    def publish(self) -> None:
        copies = [weight for weight in self.weights.values() if weight.working is not weight.stored]
        if copies:
            torch._foreach_copy_([weight.working for weight in copies], [weight.stored for weight in copies])

    def free_gathered(self) -> None:
        """Do nothing, because nothing is gathered."""

    def gathered(self) -> list[Tensor]:
        return [weight.working for weight in self.weights.values() if weight.working is not weight.stored]

    def partial_gradients(self) -> list[Tensor]:
        working = [p.grad for p in self.weights if p.grad is not None]
        return working + [b.pending.out for b in self._buckets if b.pending is not None]


@dataclass(frozen=True)
class Weight:
    """The copies of one weight. They are the same parameter if their dtypes are the same."""

    working: nn.Parameter
    """The copy that the step computes with."""
    stored: nn.Parameter
    """The copy that the optimizer updates."""
    summed: nn.Parameter
    """The copy whose ``.grad`` sums gradients over micro-batches, in the dtype ``StepTypes.reduced``. This is either
    ``working`` or ``stored``."""

    def keep_gradient(self) -> None:
        """Move the gradient of a micro-batch into the sum over micro-batches.

        If ``summed`` is the working copy, autograd has already done so. If there is no gradient, do nothing.
        """
        if self.summed is self.working or self.working.grad is None:
            return
        if self.summed.grad is None:
            self.summed.grad = self.working.grad.to(self.summed.grad_dtype)
        else:
            self.summed.grad += self.working.grad
        self.working.grad = None

    def finish_gradient(self) -> None:
        """Move the sum of the gradients to ``.grad`` of the stored weight."""
        if self.summed is not self.stored and self.summed.grad is not None:
            self.stored.grad = self.summed.grad.to(self.stored.grad_dtype)
            self.summed.grad = None


class Bucket:
    """A group of weights. One all-reduce sums their gradients over the replicas, as soon as all of these gradients are
    computed."""

    def __init__(self, weights: Sequence[Weight], replicas: Axis, dtype: torch.dtype) -> None:
        """Group weights into a bucket.

        Args:
            weights: The weights.
            replicas: The ranks that hold the same weights.
            dtype: The dtype in which the ranks' gradients are summed.
        """
        self.weights, self.replicas, self.dtype = weights, replicas, dtype
        self.pending: Pending | None = None
        self._missing: set[nn.Parameter] | None = None
        self._unused: set[nn.Parameter] = set()
        self._weight_of = {weight.working: weight for weight in weights}
        # Hooks must refer to the bucket only weakly. The bucket refers to its weights, so a strong reference would make
        # a cycle. The garbage collector does not see hooks, and could never free this cycle.
        arrived = WeakMethod(self._arrived)

        def call(working: nn.Parameter) -> None:
            method = arrived()
            assert method is not None, "a bucket lives as long as its model"
            method(working)

        for weight in weights:
            weight.working.register_post_accumulate_grad_hook(call)

    def begin_backward(self, last: bool) -> None:
        """Prepare for a backward pass. Only the ``last`` backward pass of a step starts the sum over the replicas."""
        self._missing = set(self._weight_of) if last else None

    def _arrived(self, working: nn.Parameter) -> None:
        self._weight_of[working].keep_gradient()
        if self._missing is not None:
            self._missing.discard(working)
            if not self._missing:
                self.start()

    def start(self) -> None:
        """Start the sum over the replicas, unless it has already started or there is only one replica."""
        self._missing = None
        if self.replicas.size == 1 or self.pending is not None:
            return
        flat = torch.cat([self._summand(weight.summed) for weight in self.weights])
        self._unused = {weight.stored for weight in self.weights if weight.summed.grad is None}
        self.pending = start_all_reduce(flat, self.replicas, "gradients")
        for weight in self.weights:
            weight.summed.grad = None

    def _summand(self, summed: nn.Parameter) -> Tensor:
        # If this rank did not use the weight in this step, its gradient is 0.
        if summed.grad is None:
            return torch.zeros(summed.numel(), dtype=self.dtype, device=summed.device)
        return summed.grad.flatten()

    def wait(self) -> None:
        """Wait for the sum, and set it as ``.grad`` of the stored weights.

        If no rank used a weight in this step, the weight gets no gradient, as on one process.
        """
        if self.pending is None:
            return
        parts = self.pending.wait().split([weight.stored.numel() for weight in self.weights])
        for weight, part in zip(self.weights, parts, strict=True):
            if weight.stored not in self._unused or part.any():
                weight.stored.grad = part.view_as(weight.stored).to(weight.stored.grad_dtype)
        self.pending = None


def _in_order_of_the_backward(model: nn.Module, units: Units) -> list[list[nn.Parameter]]:
    """Group parameters by unit, in the order of the backward pass: head, blocks from last to first, embeddings, root.

    A tied weight belongs to the group that the backward pass reaches last, because its gradient is complete only then.
    """
    groups = [units.last, *([block] for block in reversed(units.blocks)), units.embeddings]
    parameters = [[p for module in group for p in module.parameters()] for group in groups]
    named = {p for group in parameters for p in group}
    parameters.append([p for p in model.parameters() if p not in named])
    last_group = {p: i for i, group in enumerate(parameters) for p in group}
    return [[p for p in group if last_group[p] == i] for i, group in enumerate(parameters) if group]
