"""Read and write `layout.json`, which tells which file of a checkpoint has which part of a tensor.

Each process writes at most one file. The sizes of the grid and the axes that cut each tensor determine what is in each
file. So no process needs a list of all parts: every process can compute which files have the parts that it needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from fourfold.checkpoints.integrity import check_small_file, damaged
from fourfold.config.run import AXES
from fourfold.config.strict import Strict
from fourfold.models.dtypes import SAFETENSORS_DTYPES
from fourfold.parallel.tensor.sharding import chunk, cut, shard_number

LAYOUT_FILE = "layout.json"
MOST_RANKS = 2**20

TOKEN_AXES = ("dp", "cp", "z")
CUTTING = ("ep", "x", "y")
"""Axes that can cut a tensor into tiles, outermost first."""

Box = tuple[slice, ...]
"""A part of a tensor, given as a range in every dim."""

Cuts = tuple[bool, ...]


class SavedTensor(Strict):
    """One tensor, and how it is cut."""

    dtype: str
    """Dtype, as safetensors names it."""
    shape: tuple[int, ...] = Field(strict=False)
    x: int | None = None
    """Dim that axis x cuts. None if the ranks of x hold copies."""
    y: int | None = None
    """Dim that axis y cuts, after x. None if the ranks of y hold copies."""
    ep: int | None = None
    """Dim that axis ep cuts. None if the ranks of ep hold copies."""
    sharded: bool = True
    """Whether `sharded_over` cuts the tensor."""
    sharded_dim: int = 0
    """Dim along which `sharded_over` cuts the tiles."""
    pp: int = 0
    """Pipeline rank that writes the tensor."""
    copy_number: int = 0
    """Index of the copy that is written, if several processes hold copies."""

    @property
    def cuts(self) -> Cuts:
        """Return whether x, y, ep, and `sharded_over` cut the tensor."""
        return self.x is not None, self.y is not None, self.ep is not None, self.sharded


class CheckpointTensors(Strict):
    """The tensors of a checkpoint, and the grid that wrote them."""

    sizes: dict[str, int]
    """Sizes of the grid's axes."""
    sharded_over: tuple[str, ...] = Field(strict=False)
    """Axes that cut the tiles into shards, as torch.chunk does."""
    shards_per_node: int = Field(1, ge=1)
    """Number of ranks of a shard group on one node. If it is above 1, the shards have another order than the ranks
    (`parallel.tensor.sharding.shard_number`)."""
    ep: int = Field(1, ge=1)
    """Number of ranks that share the experts."""
    tensors: dict[str, SavedTensor]

    @model_validator(mode="after")
    def _check_possible(self) -> Self:
        if tuple(self.sizes) != AXES or min(self.sizes.values()) < 1 or self.ranks > MOST_RANKS:
            raise ValueError(f"impossible sizes {self.sizes}")
        if self.sharded_over not in (("z",), ("dp", "cp", "z")):
            raise ValueError(f"impossible sharded_over {self.sharded_over}")
        if self.token_ranks % (self.ep * max(self._shards // self.ep, 1)):
            raise ValueError(f"impossible ep {self.ep}")
        if self._shards > self.shards_per_node and self._shards % self.shards_per_node:
            raise ValueError(f"impossible shards_per_node {self.shards_per_node}")
        for name, tensor in self.tensors.items():
            if (
                tensor.dtype not in SAFETENSORS_DTYPES
                or not self._divides(tensor)
                or not 0 <= tensor.sharded_dim < max(len(tensor.shape), 1)
                or not 0 <= tensor.pp < self.sizes["pp"]
                or not 0 <= tensor.copy_number < self.copies(tensor)
            ):
                raise ValueError(f"impossible tensor {name}")
        return self

    def _divides(self, tensor: SavedTensor) -> bool:
        pieces = [1] * len(tensor.shape)
        for dim, number, _ in self._cuts(tensor, {}):
            if dim is not None:
                if not 0 <= dim < len(pieces):
                    return False
                pieces[dim] *= number
        return all(size >= 0 and size % n == 0 for size, n in zip(tensor.shape, pieces, strict=True))

    @property
    def ranks(self) -> int:
        """Return the number of processes that wrote the checkpoint."""
        return math.prod(self.sizes.values())

    @property
    def token_ranks(self) -> int:
        """Return the number of processes that split the tokens."""
        return math.prod(self.sizes[axis] for axis in TOKEN_AXES)

    def copies(self, tensor: SavedTensor) -> int:
        """Return the number of processes that hold the same part of a tensor."""
        return self.token_copies(tensor) * math.prod(self.sizes[axis] for axis in self._copied_over(tensor))

    def token_copies(self, tensor: SavedTensor) -> int:
        """Return the number of processes that hold the same part of a tensor and differ only in dp, cp, or z."""
        return self.token_ranks // self._experts(tensor) // self._pieces_of(tensor)

    def part_of(self, name: str, rank: int) -> Box:
        """Return the part of a tensor that a process holds, even if another process writes it.

        If the tensor belongs to another pipeline stage, return the part that the process would hold if the tensor were
        in its own stage.
        """
        tensor, place = self.tensors[name], dict(zip(AXES, _unravel(rank, list(self.sizes.values())), strict=True))
        ep, piece, _ = self._held_of(tensor, place)
        return self._part(tensor, self._tile(tensor, place | {"ep": ep}), piece)

    def held_by(self, rank: int) -> dict[str, Box]:
        """Return the parts in the file of a process, in the order of the file. Empty if the process has no file."""
        place = dict(zip(AXES, _unravel(rank, list(self.sizes.values())), strict=True))
        held, found = {}, dict[Cuts, tuple[int, int, int]]()
        for name, tensor in self.tensors.items():
            if tensor.cuts not in found:
                found[tensor.cuts] = self._held_of(tensor, place)
            ep, piece, copy_number = found[tensor.cuts]
            if tensor.pp == place["pp"] and tensor.copy_number == copy_number:
                part = self._part(tensor, self._tile(tensor, place | {"ep": ep}), piece)
                if not is_empty(part):
                    held[name] = part
        return held

    def parts(self, name: str, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the parts of a tensor that overlap a box, each with the rank whose file has it."""
        tensor = self.tensors[name]
        for places in itertools.product(*(range(number) for _, number, _ in self._cuts(tensor, {}))):
            place = dict(zip(CUTTING, places, strict=True))
            tile = self._tile(tensor, place)
            if is_empty(intersection(tile, wanted)):
                continue
            for piece in self._pieces(tensor, tile, wanted):
                yield self._rank(tensor, place, piece), self._part(tensor, tile, piece)

    def _cuts(self, tensor: SavedTensor, place: Mapping[str, int]) -> list[tuple[int | None, int, int]]:
        """Return (dim, number of pieces, index of the piece) for each axis.

        An axis that does not cut the tensor has one piece.
        """
        sizes = {**self.sizes, "ep": self.ep}
        dims = {axis: getattr(tensor, axis) for axis in CUTTING}
        return [(dim, 1, 0) if dim is None else (dim, sizes[axis], place.get(axis, 0)) for axis, dim in dims.items()]

    def _tile(self, tensor: SavedTensor, place: Mapping[str, int]) -> Box:
        return cut(tensor.shape, self._cuts(tensor, place))

    def _experts(self, tensor: SavedTensor) -> int:
        """Return the number of neighboring token ranks that hold different tiles of a tensor."""
        return 1 if tensor.ep is None else self.ep

    def _pieces_of(self, tensor: SavedTensor) -> int:
        """Return the number of pieces into which `sharded_over` cuts a tile."""
        return max(self._shards // self._experts(tensor), 1) if tensor.sharded else 1

    def _per_node(self, tensor: SavedTensor) -> int:
        return self.shards_per_node if self._experts(tensor) == 1 and tensor.sharded else 1

    def _held_of(self, tensor: SavedTensor, place: Mapping[str, int]) -> tuple[int, int, int]:
        """Return which part of a tensor a process holds: its ep rank, the index of its piece, and the index of its
        copy."""
        number, pieces = self._number(place, TOKEN_AXES), self._pieces_of(tensor)
        replica, ep = divmod(number, self._experts(tensor))
        token_copy, rank = divmod(replica, pieces)
        plane = [(place[axis], self.sizes[axis]) for axis in self._copied_over(tensor)]
        copy_number = _ravel([(token_copy, self.token_copies(tensor)), *plane])
        return ep, shard_number(rank, pieces, self._per_node(tensor)), copy_number

    def _copied_over(self, tensor: SavedTensor) -> list[str]:
        """Return which of the axes y and x have ranks that hold copies, outermost first."""
        return [axis for axis in ("y", "x") if getattr(tensor, axis) is None]

    def _number(self, place: Mapping[str, int], axes: Sequence[str]) -> int:
        """Return the row-major index of a process on some of the axes."""
        return _ravel([(place[axis], self.sizes[axis]) for axis in axes])

    def _part(self, tensor: SavedTensor, tile: Box, piece: int) -> Box:
        cut_dim = tensor.sharded_dim
        pieces = self._pieces_of(tensor)
        return tuple(chunk(each, pieces, piece) if dim == cut_dim else each for dim, each in enumerate(tile))

    def _pieces(self, tensor: SavedTensor, tile: Box, wanted: Box) -> range:
        """Return the pieces of a tile that overlap a box. The box must overlap the tile."""
        if not tile:
            return range(1)
        dim = tensor.sharded_dim
        whole, common = tile[dim], intersection(tile, wanted)[dim]
        size = math.ceil((whole.stop - whole.start) / self._pieces_of(tensor))
        return range((common.start - whole.start) // size, (common.stop - 1 - whole.start) // size + 1)

    @property
    def _shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.sharded_over)

    def _rank(self, tensor: SavedTensor, tile: Mapping[str, int], piece: int) -> int:
        """Return the process that writes a part."""
        pieces, per_node = self._pieces_of(tensor), self._per_node(tensor)
        copied = self._copied_over(tensor)
        sizes = [self.token_copies(tensor), *(self.sizes[axis] for axis in copied)]
        token_copy, *plane = _unravel(tensor.copy_number, sizes)
        rank = shard_number(piece, pieces, max(pieces // per_node, 1))
        number = (token_copy * pieces + rank) * self._experts(tensor) + tile["ep"]
        place = {"pp": tensor.pp, "x": tile["x"], "y": tile["y"]}
        place |= zip(TOKEN_AXES, _unravel(number, [self.sizes[axis] for axis in TOKEN_AXES]), strict=True)
        place |= zip(copied, plane, strict=True)
        return self._number(place, AXES)


def file_of(rank: int) -> str:
    """Return the name of a process's file."""
    return f"rank_{rank:05}.safetensors"


def write_layout(folder: Path, layout: CheckpointTensors) -> None:
    """Write `layout.json`."""
    (folder / LAYOUT_FILE).write_text(layout.model_dump_json(exclude_defaults=True) + "\n")


def read_layout(folder: Path) -> CheckpointTensors:
    """Read `layout.json`.

    Raises:
        DamagedCheckpoint: The file is missing, has changed, or is not a valid layout.
    """
    file = folder / LAYOUT_FILE
    check_small_file(file)
    try:
        return CheckpointTensors.model_validate_json(file.read_bytes())
    except ValueError:
        raise damaged(file, "it is not a layout") from None


def intersection(some: Box, other: Box) -> Box:
    """Return the part that two boxes share."""
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(some, other, strict=True))


def inside(part: Box, whole: Box) -> Box:
    """Return a part in the coordinates of its enclosing box."""
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))


def is_empty(box: Box) -> bool:
    """Return whether a box has no element."""
    return any(each.start >= each.stop for each in box)


def _unravel(number: int, sizes: list[int]) -> list[int]:
    """Return the index on each axis for a row-major index."""
    return [int(place) for place in np.unravel_index(number, sizes)]


def _ravel(places: list[tuple[int, int]]) -> int:
    """Return the row-major index of (index on the axis, axis size) pairs."""
    number = 0
    for place, size in places:
        number = number * size + place
    return number
