"""Read and write `layout.json`. It maps each part of a tensor to the checkpoint file that holds the part.

Each process writes at most one file. The axes ep, x, and y cut a tensor into tiles, and data parallelism can cut each
tile into shards. A part of a tensor is a whole tile or a shard of a tile. `layout.json` does not list all parts. It has
the sizes of the grid, and for each tensor the axes that cut the tensor. From these sizes and axes, a process computes
which files have the parts that it needs.
"""

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
"""Axes that can cut a tensor into tiles. If several axes cut the same dim, they cut it in this order."""

Box = tuple[slice, ...]
"""A part of a tensor, given as one slice per dim."""

Cuts = tuple[bool, ...]


class SavedTensor(Strict):
    """A tensor of a checkpoint, and how the grid cuts it."""

    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...] = Field(strict=False)
    x: int | None = None
    """The dim that the axis x cuts. None if the ranks of x hold copies."""
    y: int | None = None
    """The dim that the axis y cuts. None if the ranks of y hold copies. If x cuts the same dim, x cuts it first."""
    ep: int | None = None
    """The dim that the axis ep cuts. None if the ranks of ep hold copies."""
    sharded: bool = True
    """Whether the axes in `CheckpointTensors.sharded_over` cut the tiles of this tensor into shards."""
    sharded_dim: int = 0
    """The dim along which tiles are cut into shards."""
    pp: int = 0
    """The pipeline rank that writes the tensor."""
    copy_number: int = 0
    """If several processes hold copies of a part, the index of the copy that is written."""

    @property
    def cuts(self) -> Cuts:
        """Return four flags: whether x, y, ep, and the axes in `sharded_over` cut the tensor."""
        return self.x is not None, self.y is not None, self.ep is not None, self.sharded


class CheckpointTensors(Strict):
    """The tensors of a checkpoint, and the grid that wrote them."""

    sizes: dict[str, int]
    """The size of each axis of the grid, by the axis's name."""
    sharded_over: tuple[str, ...] = Field(strict=False)
    """The axes that cut tiles into shards. The shards of a tile have the sizes that torch.chunk gives."""
    shards_per_node: int = Field(1, ge=1)
    """Number of ranks per node among the ranks that hold the shards of one tile. If this number is above 1, the order
    of the shards differs from the order of the ranks (see `parallel.tensor.sharding.shard_number`)."""
    ep: int = Field(1, ge=1)
    """Number of ranks that together hold one copy of the experts."""
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
        """Return the number of processes that split the tokens (dp·cp·z)."""
        return math.prod(self.sizes[axis] for axis in TOKEN_AXES)

    def copies(self, tensor: SavedTensor) -> int:
        """Return how many processes hold a copy of one part of a tensor. All parts have the same number of copies."""
        return self.token_copies(tensor) * math.prod(self.sizes[axis] for axis in self._copied_over(tensor))

    def token_copies(self, tensor: SavedTensor) -> int:
        """Return how many processes that differ only in dp, cp, or z hold a copy of one part of a tensor."""
        return self.token_ranks // self._experts(tensor) // self._pieces_of(tensor)

    def part_of(self, name: str, rank: int) -> Box:
        """Return the part of a tensor that a process holds, even if another process writes this part.

        The result does not depend on the rank's position on the axis pp, so you can also ask for a tensor of another
        pipeline stage.
        """
        tensor, place = self.tensors[name], dict(zip(AXES, _unravel(rank, list(self.sizes.values())), strict=True))
        ep, piece, _ = self._held_of(tensor, place)
        return self._part(tensor, self._tile(tensor, place | {"ep": ep}), piece)

    def held_by(self, rank: int) -> dict[str, Box]:
        """Return which part of each tensor a process writes to its file, by tensor name and in the order of the file.
        If the process writes no file, the dictionary is empty."""
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
        """Find the parts of a tensor that overlap a box. Yield the rank whose file contains the part, then the part."""
        tensor = self.tensors[name]
        for places in itertools.product(*(range(number) for _, number, _ in self._cuts(tensor, {}))):
            place = dict(zip(CUTTING, places, strict=True))
            tile = self._tile(tensor, place)
            if is_empty(intersection(tile, wanted)):
                continue
            for piece in self._pieces(tensor, tile, wanted):
                yield self._rank(tensor, place, piece), self._part(tensor, tile, piece)

    def _cuts(self, tensor: SavedTensor, place: Mapping[str, int]) -> list[tuple[int | None, int, int]]:
        """Return how each axis in `CUTTING` cuts the tensor: (dim, number of pieces, index of the process's piece).

        If an axis does not cut the tensor, there is one piece, and the dim is None.
        """
        sizes = {**self.sizes, "ep": self.ep}
        dims = {axis: getattr(tensor, axis) for axis in CUTTING}
        return [(dim, 1, 0) if dim is None else (dim, sizes[axis], place.get(axis, 0)) for axis, dim in dims.items()]

    def _tile(self, tensor: SavedTensor, place: Mapping[str, int]) -> Box:
        return cut(tensor.shape, self._cuts(tensor, place))

    def _experts(self, tensor: SavedTensor) -> int:
        """Return the number of ranks over which the axis ep splits a tensor, or 1 if ep does not cut the tensor."""
        return 1 if tensor.ep is None else self.ep

    def _pieces_of(self, tensor: SavedTensor) -> int:
        """Return the number of shards in each tile of a tensor."""
        return max(self._shards // self._experts(tensor), 1) if tensor.sharded else 1

    def _per_node(self, tensor: SavedTensor) -> int:
        return self.shards_per_node if self._experts(tensor) == 1 and tensor.sharded else 1

    def _held_of(self, tensor: SavedTensor, place: Mapping[str, int]) -> tuple[int, int, int]:
        """Return which part of a tensor a process holds, as three numbers: the rank on the axis ep, the index of the
        shard, and the index of the copy."""
        number, pieces = self._number(place, TOKEN_AXES), self._pieces_of(tensor)
        replica, ep = divmod(number, self._experts(tensor))
        token_copy, rank = divmod(replica, pieces)
        copied = self._copied_over(tensor)
        sizes = [self.token_copies(tensor), *(self.sizes[axis] for axis in copied)]
        copy_number = _ravel([token_copy, *(place[axis] for axis in copied)], sizes)
        return ep, shard_number(rank, pieces, self._per_node(tensor)), copy_number

    def _copied_over(self, tensor: SavedTensor) -> list[str]:
        """Return which of the axes y and x do not cut a tensor. The ranks of these axes hold copies of each part."""
        return [axis for axis in ("y", "x") if getattr(tensor, axis) is None]

    def _number(self, place: Mapping[str, int], axes: Sequence[str]) -> int:
        """Combine the positions of a process on some axes into one row-major index."""
        return _ravel([place[axis] for axis in axes], [self.sizes[axis] for axis in axes])

    def _part(self, tensor: SavedTensor, tile: Box, piece: int) -> Box:
        cut_dim = tensor.sharded_dim
        pieces = self._pieces_of(tensor)
        return tuple(chunk(each, pieces, piece) if dim == cut_dim else each for dim, each in enumerate(tile))

    def _pieces(self, tensor: SavedTensor, tile: Box, wanted: Box) -> range:
        """Return which shards of a tile overlap a box, as a range of indices. The box must overlap the tile."""
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
        """Return the rank of the process that writes a shard of a tile."""
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
    """Return the name of the tensor file that the process with this rank writes."""
    return f"rank_{rank:05}.safetensors"


def write_layout(folder: Path, layout: CheckpointTensors) -> None:
    """Write `layout.json` into a checkpoint's folder."""
    (folder / LAYOUT_FILE).write_text(layout.model_dump_json(exclude_defaults=True) + "\n")


def read_layout(folder: Path) -> CheckpointTensors:
    """Read `layout.json` from a checkpoint's folder.

    Raises:
        DamagedCheckpoint: The file is missing, has changed, or is not a valid layout.
    """
    file = folder / LAYOUT_FILE
    check_small_file(file)
    try:
        return CheckpointTensors.model_validate_json(file.read_bytes())
    except ValueError:
        raise damaged(file, "it is not a valid layout") from None


def intersection(some: Box, other: Box) -> Box:
    """Return the overlap of two boxes."""
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(some, other, strict=True))


def inside(part: Box, whole: Box) -> Box:
    """Return the part in coordinates relative to the start of the box ``whole``."""
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))


def is_empty(box: Box) -> bool:
    """Return whether a box has no elements."""
    return any(each.start >= each.stop for each in box)


def _unravel(number: int, sizes: list[int]) -> list[int]:
    """Split a row-major index into the index on each axis."""
    return [int(place) for place in np.unravel_index(number, sizes)]


def _ravel(places: list[int], sizes: list[int]) -> int:
    """Combine the index on each axis into one row-major index."""
    return int(np.ravel_multi_index(places, sizes))
