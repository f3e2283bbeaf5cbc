"""Describe which tile of each parameter a rank holds. Initial weights, checkpoints, parity, and gradient norms use this
description."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Axis, Grid


@dataclass(frozen=True)
class Tile:
    """How the tensor axes x and y, and the expert axis ep, split a parameter into tiles.

    Attributes:
        x, y, ep: the dim that the axis splits, or None if the ranks of the axis hold the same values. If x and y
            split the same dim, x splits it first, and y splits the parts.
        partial_over: the axes over which the gradient must be summed, because each rank of such an axis computes only a
            part of the gradient.
        turned: whether the tile is stored with its first two dims exchanged, so FSDP2 splits the second dim. Shapes
            and slices in this class always describe the tile, not its stored form.
        sharded: whether FSDP2 may split the tile further, over z, and with ``zero`` above 0 also over dp·cp. If False,
            each rank of z, dp, and cp holds the whole tile.
    """

    x: int | None = None
    y: int | None = None
    partial_over: tuple[str, ...] = ()
    turned: bool = False
    ep: int | None = None
    sharded: bool = True

    def local_shape(self, shape: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """Return the shape of a rank's tile, given the shape of the full parameter."""
        local = list(shape)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                assert local[dim] % axis.size == 0, f"{shape} does not divide over {axis.name} = {axis.size}"
                local[dim] //= axis.size
        return tuple(local)

    def global_shape(self, local: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """Return the shape of the full parameter, given the shape of a tile."""
        shape = list(local)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                shape[dim] *= axis.size
        return tuple(shape)

    @property
    def sharded_dim(self) -> int:
        """Return which dim of the tile FSDP2 splits: the dim that comes first in the stored parameter."""
        return 1 if self.turned else 0

    def as_tile(self, stored: Tensor) -> Tensor:
        """Convert a stored parameter to its tile, or a tile to its stored form. If ``turned``, return a transposed
        view."""
        return stored.transpose(0, 1) if self.turned else stored

    def slices(self, shape: tuple[int, ...], grid: Grid) -> tuple[slice, ...]:
        """Return which slices of the full parameter this rank's tile holds."""
        return cut(shape, [(dim, axis.size, axis.rank) for dim, axis in self._cuts(grid)])

    def _cuts(self, grid: Grid) -> tuple[tuple[int | None, Axis], ...]:
        return (self.ep, grid.ep), (self.x, grid.x), (self.y, grid.y)


def cut(shape: Sequence[int], cuts: Sequence[tuple[int | None, int, int]]) -> tuple[slice, ...]:
    """Cut a tensor evenly, once or several times, and return the slices of one piece.

    Args:
        cuts: (dim, number of pieces, index of this piece) for each cut, in the order of the cuts. A dim of None means
            no cut.
    """
    begin, length = [0] * len(shape), list(shape)
    for dim, pieces, piece in cuts:
        if dim is not None:
            length[dim] //= pieces
            begin[dim] += piece * length[dim]
    return tuple(slice(b, b + n) for b, n in zip(begin, length, strict=True))


def shard_number(rank: int, ranks: int, per_node: int) -> int:
    """Return the index of the shard that a rank of a shard group holds.

    Usually this is the rank itself. But if the group has two levels, consecutive shards are on different nodes
    (``TwoLevels.rank``). First come the shards of the first rank of each node, then the shards of the second rank of
    each node, and so on. To find the rank of a shard, pass the shard as ``rank`` and the number of nodes as
    ``per_node``.

    Args:
        rank: the rank within the shard group.
        ranks: the size of the shard group.
        per_node: the number of the group's ranks on each node.
    """
    if not 1 < per_node < ranks:
        return rank
    node, place = divmod(rank, per_node)
    return place * (ranks // per_node) + node


def chunk(rows: slice, pieces: int, piece: int) -> slice:
    """Cut a range of rows into pieces as torch.chunk and FSDP2 do, and return one piece.

    The last pieces may be shorter, or empty.
    """
    size = math.ceil((rows.stop - rows.start) / pieces)
    first, last = (min(rows.start + number * size, rows.stop) for number in (piece, piece + 1))
    return slice(first, last)


class Tiled(nn.Module):
    """A module whose parameters are tiles. ``tiles`` maps a parameter's name to the description of its tile."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles: dict[str, Tile] = {}

    def add_tile(self, name: str, parameter: Tensor | None, tile: Tile, grid: Grid) -> None:
        """Register this rank's tile of a parameter under ``name``, on the meta device. If there is no parameter,
        register None."""
        if parameter is None:
            self.register_parameter(name, None)
            return
        local = torch.empty(tile.local_shape(tuple(parameter.shape), grid), dtype=parameter.dtype, device="meta")
        stored = tile.as_tile(local).contiguous()
        self.register_parameter(name, nn.Parameter(stored, requires_grad=parameter.requires_grad))
        self.tiles[name] = tile


def tile_table(model: nn.Module) -> dict[str, Tile]:
    """Return the tile of every parameter of a model, by its full name.

    If a module does not describe a parameter, no axis splits the parameter, so its tile is the default ``Tile()``. A
    module that is not ``Tiled`` can have the attribute ``tiles`` too, if the gradients of its parameters must be summed
    over ranks.
    """
    table: dict[str, Tile] = {}
    for prefix, module in model.named_modules():
        tiles: dict[str, Tile] = getattr(module, "tiles", {})
        for name, _ in module.named_parameters(recurse=False):
            table[f"{prefix}.{name}" if prefix else name] = tiles.get(name, Tile())
    return table


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter, which is a parameter with more than one name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again after modules or parameters were replaced.

    Args:
        tied: the result of ``tied_names`` before the replacement.

    Raises:
        UserError: Two parameters that must be tied have tiles of different shapes.
    """
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name).shape != parameter.shape:
                raise UserError(
                    f"{first} and {name} are one weight, but their rules split it differently; give both the same rule"
                )
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, parameter)
