"""Describe how the tensor axes x and y cut each parameter into tiles. Checkpoints, parity, and gradient norms use this
description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Axis, Grid


@dataclass(frozen=True)
class Tile:
    """How the ranks of one (x, y) plane, and of the expert axis ep, cut a parameter.

    Attributes:
        x, y, ep: the dim that the axis splits, or None if its ranks hold the same values. If x and y split the same
            dim, x is the outer cut.
        partial_over: axes that the gradient must be summed over, because each of their ranks computes only a part of
            it.
        turned: whether the tile of a matrix is stored as its transpose. Shapes and slices here are not transposed.
        sharded: whether z, and with ``zero`` also dp·cp, may cut the tile further. Otherwise each of their ranks holds
            the whole tile.
    """

    x: int | None = None
    y: int | None = None
    partial_over: tuple[str, ...] = ()
    turned: bool = False
    ep: int | None = None
    sharded: bool = True

    def local_shape(self, shape: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """Return the shape of one rank's tile, for a parameter with the global ``shape``."""
        local = list(shape)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                assert local[dim] % axis.size == 0, f"{shape} does not divide over {axis.name} = {axis.size}"
                local[dim] //= axis.size
        return tuple(local)

    def global_shape(self, local: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """Return the global shape of a parameter whose tiles have the shape ``local``."""
        shape = list(local)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                shape[dim] *= axis.size
        return tuple(shape)

    @property
    def sharded_dim(self) -> int:
        """Return the dim of the tile that FSDP2 cuts, which is the first dim of the stored parameter."""
        return 1 if self.turned else 0

    def as_tile(self, stored: Tensor) -> Tensor:
        """Convert a stored parameter to its tile, or a tile to its stored form. Nothing is copied."""
        return stored.T if self.turned else stored

    def slices(self, shape: tuple[int, ...], grid: Grid) -> tuple[slice, ...]:
        """Return the slices of the global parameter that are this rank's tile."""
        return cut(shape, [(dim, axis.size, axis.rank) for dim, axis in self._cuts(grid)])

    def _cuts(self, grid: Grid) -> tuple[tuple[int | None, Axis], ...]:
        return (self.ep, grid.ep), (self.x, grid.x), (self.y, grid.y)


def cut(shape: Sequence[int], cuts: Sequence[tuple[int | None, int, int]]) -> tuple[slice, ...]:
    """Return the slices of one part of a tensor that is cut evenly.

    Args:
        cuts: (dim or None, number of pieces, index of this piece) for each cut, outer cuts first.
    """
    begin, length = [0] * len(shape), list(shape)
    for dim, pieces, piece in cuts:
        if dim is not None:
            length[dim] //= pieces
            begin[dim] += piece * length[dim]
    return tuple(slice(b, b + n) for b, n in zip(begin, length, strict=True))


def shard_number(rank: int, ranks: int, per_node: int) -> int:
    """Return the index of the piece that a rank of a shard group holds: its rank, unless the group has two levels.

    With two levels, the first ranks of all nodes hold the first pieces, then the second ranks, and so on
    (``TwoLevels.rank``). If you pass the number of nodes as ``per_node``, you get the inverse, from a piece to its
    rank.

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
    """Return one piece of rows, cut like torch.chunk and FSDP2 cut them: the last pieces may be shorter, or empty."""
    size = math.ceil((rows.stop - rows.start) / pieces)
    first, last = (min(rows.start + number * size, rows.stop) for number in (piece, piece + 1))
    return slice(first, last)


class Tiled(nn.Module):
    """A module whose parameters are tiles. ``tiles`` maps each parameter's name to its tile."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles: dict[str, Tile] = {}

    def add_tile(self, name: str, parameter: Tensor | None, tile: Tile, grid: Grid) -> None:
        """Register this rank's tile of a (meta) parameter under ``name``, or None if there is no parameter."""
        if parameter is None:
            self.register_parameter(name, None)
            return
        local = torch.empty(tile.local_shape(tuple(parameter.shape), grid), dtype=parameter.dtype, device="meta")
        self.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
        self.tiles[name] = tile


def tile_table(model: nn.Module) -> dict[str, Tile]:
    """Return the tile of every parameter of a model, by its full name. A parameter without a tile gets an empty
    ``Tile``, so every rank holds all of it.

    A module that is not ``Tiled`` may also have the attribute ``tiles``. It is for parameters that no axis splits, but
    whose gradients must be summed over ranks.
    """
    table: dict[str, Tile] = {}
    for prefix, module in model.named_modules():
        tiles: dict[str, Tile] = getattr(module, "tiles", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is not None:
                table[f"{prefix}.{name}" if prefix else name] = tiles.get(name, Tile())
    return table


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has more than one name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie the parameters again whose names ``tied_names`` returned before modules or parameters were replaced.

    Raises:
        UserError: The tiles of two tied parameters have different shapes.
    """
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name).shape != parameter.shape:
                raise UserError(
                    f"{first} and {name} are one weight, and their rules lay it out in two ways; use the same rule"
                )
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, parameter)
