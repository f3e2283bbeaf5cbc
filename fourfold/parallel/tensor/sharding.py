"""The place of each parameter on the (x, y) plane: the one description from which everything global follows."""

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
    """The cut of a parameter into the tiles that the ranks of one (x, y) plane hold, and of ep.

    x, y, ep: the dim that the axis splits, or None where its ranks hold the same values. Where x and y split one dim, x
    is the outer cut. partial_over: axes over which each rank's gradient is only its share of the sum. turned: the
    parameter is a matrix whose tile is stored as its transpose; shapes and slices here are the tile's. sharded: z, and
    with ``zero`` dp·cp, may cut the tile further; else each of their ranks holds it.
    """

    x: int | None = None
    y: int | None = None
    partial_over: tuple[str, ...] = ()
    turned: bool = False
    ep: int | None = None
    sharded: bool = True

    def local_shape(self, shape: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """The shape of one rank's tile of a parameter of the global ``shape``."""
        local = list(shape)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                assert local[dim] % axis.size == 0, f"{shape} does not divide over {axis.name} = {axis.size}"
                local[dim] //= axis.size
        return tuple(local)

    def global_shape(self, local: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        """The inverse of ``local_shape``."""
        shape = list(local)
        for dim, axis in self._cuts(grid):
            if dim is not None:
                shape[dim] *= axis.size
        return tuple(shape)

    @property
    def sharded_dim(self) -> int:
        """The dim of the tile that FSDP2 cuts: the first of the parameter as it is stored."""
        return 1 if self.turned else 0

    def as_tile(self, stored: Tensor) -> Tensor:
        """The tile that is stored as ``stored``, without a copy; also the reverse."""
        return stored.T if self.turned else stored

    def slices(self, shape: tuple[int, ...], grid: Grid) -> tuple[slice, ...]:
        """The part of the global parameter that is this rank's tile."""
        return cut(shape, [(dim, axis.size, axis.rank) for dim, axis in self._cuts(grid)])

    def _cuts(self, grid: Grid) -> tuple[tuple[int | None, Axis], ...]:
        return (self.ep, grid.ep), (self.x, grid.x), (self.y, grid.y)


def cut(shape: Sequence[int], cuts: Sequence[tuple[int | None, int, int]]) -> tuple[slice, ...]:
    """One part of a tensor that is cut evenly: (dim or None, pieces, the piece) of every cut, the outer ones first."""
    begin, length = [0] * len(shape), list(shape)
    for dim, pieces, piece in cuts:
        if dim is not None:
            length[dim] //= pieces
            begin[dim] += piece * length[dim]
    return tuple(slice(b, b + n) for b, n in zip(begin, length, strict=True))


def piece_of(rank: int, ranks: int, per_node: int) -> int:
    """The number of the piece that a rank of a shard group holds: its own, unless the group has two levels.

    There the first ranks of all nodes have the first pieces, and so on (``TwoLevels.rank``). With the number of nodes
    as per_node it is the inverse: from a piece to its rank.
    """
    if not 1 < per_node < ranks:
        return rank
    node, place = divmod(rank, per_node)
    return place * (ranks // per_node) + node


def chunk(rows: slice, pieces: int, piece: int) -> slice:
    """One piece of rows cut as torch.chunk, and so FSDP2, does: the last ones may be shorter, or empty."""
    size = math.ceil((rows.stop - rows.start) / pieces)
    first, last = (min(rows.start + number * size, rows.stop) for number in (piece, piece + 1))
    return slice(first, last)


class Tiled(nn.Module):
    """A module whose parameters are tiles; ``tiles`` says which, by parameter name."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles: dict[str, Tile] = {}

    def add_tile(self, name: str, parameter: Tensor | None, tile: Tile, grid: Grid) -> None:
        """Register this rank's tile of a (meta) parameter under ``name``; no parameter, no tile."""
        if parameter is None:
            self.register_parameter(name, None)
            return
        local = torch.empty(tile.local_shape(tuple(parameter.shape), grid), dtype=parameter.dtype, device="meta")
        self.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
        self.tiles[name] = tile


def tile_table(model: nn.Module) -> dict[str, Tile]:
    """The tile of every parameter of a model, by its full name; whole parameters have an empty ``Tile``.

    Other modules than ``Tiled`` may have ``tiles`` too, for whole parameters whose gradients are shares of a sum.
    """
    table: dict[str, Tile] = {}
    for prefix, module in model.named_modules():
        tiles: dict[str, Tile] = getattr(module, "tiles", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is not None:
                table[f"{prefix}.{name}" if prefix else name] = tiles.get(name, Tile())
    return table


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Make one parameter again of those that were one (``tied_names``), after modules or parameters were replaced."""
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name).shape != parameter.shape:
                raise UserError(
                    f"{first} and {name} are one weight, and their rules lay it out in two ways; use the same rule"
                )
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, parameter)
