"""Initialize the weights of the whole model, and sum, clip, and gather its gradients.

Inside a step, parameters are plain local tensors. Between steps, FSDP2 keeps sharded parameters as DTensors. A DTensor
does not know about the tensor axes x and y, so torch's own functions (``clip_grad_norm_``,
``dcp.save(model.state_dict())``) silently give wrong results. Use the functions in this module instead.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.config.model import ModelConfig
from fourfold.models.initialize import fill_slice
from fourfold.parallel.grid.communicate import all_reduce, purpose
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.sharding import Tile


@dataclass(frozen=True)
class LocalShard:
    """This process's part of one parameter: its tile, or the shard of the tile that FSDP2 gives to this process."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    """The plain tensor that the optimizer updates. If ``tile`` is ``turned``, this is a transposed view
    (``Tile.as_tile``)."""
    tile: Tile
    global_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    """The slices of the global parameter that ``local`` holds."""
    replicas: int
    """The number of processes that hold this part of the parameter, including this process."""

    @property
    def current(self) -> Tensor:
        """Return the local tensor that ``parameter`` has at this moment. The optimizer asserts that this tensor and
        ``local`` share their memory."""
        return self.tile.as_tile(self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter)

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient of the local tensor, or None if there is no gradient.

        The gradient is summed over all ranks only after ``sum_partial_gradients``.
        """
        grad = self.parameter.grad
        return None if grad is None else self.tile.as_tile(grad.to_local() if isinstance(grad, DTensor) else grad)


def replicas_of_tile(tile: Tile, grid: Grid) -> int:
    """Return how many ranks hold the same tile, among ranks that differ only in their x and y positions."""
    return (grid.x.size if tile.x is None else 1) * (grid.y.size if tile.y is None else 1)


def initialize_shards(shards: Iterable[LocalShard], config: ModelConfig, seed: int) -> None:
    """Fill the weights with initial values. The values depend only on the model and the seed, so they are bit-identical
    on every grid."""
    for shard in shards:
        if shard.local.numel():
            fill_slice(shard.local, shard.name, shard.global_shape, shard.slices, config, seed)


def sum_partial_gradients(shards: Iterable[LocalShard], grid: Grid) -> None:
    """Sum the gradients of parameters whose tiles are ``partial_over`` x or y, such as norms, biases, and adapters.

    Each rank of x or y has computed such a gradient only from its own tokens or features. One collective sums the
    gradients of all parameters that are partial over the same axes. In a step, the sums over dp, cp, and z come first,
    but any order would work.
    """
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for shard in shards:
        for_axes = tuple(a for a in ("y", "x") if a in shard.tile.partial_over and grid.axis(a).size > 1)
        if for_axes and shard.grad is not None:
            by_axes.setdefault(for_axes, []).append(shard.grad)
    for axes, grads in sorted(by_axes.items()):
        flat = torch.cat([grad.flatten() for grad in grads])
        if flat.numel():
            flat = all_reduce(flat, grid.axis("_".join(axes)), "gradients of norms and biases")
        torch._foreach_copy_(
            grads, [p.view_as(g) for p, g in zip(flat.split([g.numel() for g in grads]), grads, strict=True)]
        )


def clip_gradients(shards: Sequence[LocalShard], max_norm: float, loss_scale: float = 1.0) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most ``max_norm``.

    If several processes hold the same part of a parameter, the norm counts this part once.

    Args:
        shards: This process's shards.
        max_norm: The largest allowed norm.
        loss_scale: The factor that the loss was multiplied by. The gradients are divided by it.

    Returns:
        The norm before clipping, a scalar.
    """
    grads = [shard.grad for shard in shards if shard.grad is not None]
    weights = [1.0 / shard.replicas for shard in shards if shard.grad is not None]
    squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).double().square()
    # Multiply by Python floats. If the factors were a tensor, the host would wait for its copy to the device.
    square = torch.stack(torch._foreach_mul(squares.unbind(), weights)).sum()
    with purpose("gradient norm"):
        dist.all_reduce(square)
    norm = square.sqrt().float() / loss_scale
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale)
    return norm


Part = tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]
"""A part of a parameter: its name, its global shape, the slices that the part covers, and the values."""


def gather_full(shards: Sequence[LocalShard], tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
    """Gather the shards of all processes, and return full tensors by name on rank 0. Return None on other ranks.

    ``tensors`` has one tensor per shard, such as the shard's weights or their gradients. Rank 0 must have enough
    memory for all full tensors, so use this only for tests and small models.
    """
    parts = gather_parts(shards, tensors)
    return None if parts is None else join_parts(parts)


def gather_parts(shards: Sequence[LocalShard], tensors: Sequence[Tensor]) -> list[Part] | None:
    """On rank 0, return every process's parts of the parameters. On other ranks, return None.

    If several processes hold the same part, the list contains this part several times.
    """
    mine = [(s.name, s.global_shape, s.slices, t.detach().cpu()) for s, t in zip(shards, tensors, strict=True)]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return None if everyone is None else [part for parts in everyone for part in parts]


def join_parts(parts: Iterable[Part]) -> dict[str, Tensor]:
    """Join parts of parameters into full tensors, and return them by name. Elements that no part covers are NaN."""
    whole: dict[str, Tensor] = {}
    for name, shape, slices, part in parts:
        whole.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))[slices] = part
    return whole
