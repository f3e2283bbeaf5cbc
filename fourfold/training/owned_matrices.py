"""Matrices that are cut over the ranks, each whole on one of them for what cannot be computed from parts.

The ranks of one place on pp own the matrices of its stages, as evenly as their number allows. In a round every rank
gets the parts of the matrices that it owns, transforms these, and sends every holder its part of the result: two
all-to-alls. Where several ranks hold a part, the one nearest to the owner sends it. So each matrix is transformed once,
from the values that one process would have, whatever the grid is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch import Tensor

from fourfold.checkpoints.file_layout import CheckpointTensors
from fourfold.checkpoints.global_tensors import SavedPart, own_layout
from fourfold.parallel.grid.communicate import send_rows
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.state import LocalShard

Bounds = tuple[tuple[int, int], tuple[int, int]]
"""First and last + 1 of the rows, and of the columns, of a part of a matrix."""
Unit = Sequence["Matrix"]
"""Matrices of one shape that one rank owns in a round."""


class Matrix(NamedTuple):
    """One matrix: a parameter, by its place among the shards, or one expert of a stack of them."""

    shard: int
    expert: int | None = None


@dataclass
class Round:
    """One rank's share of a round. Sizes: entries for each rank. Parts: (matrix of the own unit, bounds)."""

    shape: tuple[int, int]
    owned: int
    """Matrices of its own, of that shape."""
    sent: list[Matrix] = field(default_factory=list)
    """Those whose part it sends to the owner."""
    held: list[Matrix] = field(default_factory=list)
    """Those that it has a part of."""
    arriving: list[tuple[int, Bounds]] = field(default_factory=list)
    returned: list[tuple[int, Bounds]] = field(default_factory=list)
    sent_sizes: list[int] = field(default_factory=list)
    arriving_sizes: list[int] = field(default_factory=list)
    returned_sizes: list[int] = field(default_factory=list)
    held_sizes: list[int] = field(default_factory=list)


def deal(matrices: Mapping[tuple[int, int], Sequence[Matrix]], ranks: int) -> list[list[Unit]]:
    """Rounds, in each of which rank i owns the i-th unit: the large ones first, so that those of a round take as long.

    matrices: by shape. Small ones are taken together, evenly, but no more than have the entries of the largest of all,
    which so bounds the memory of a round.
    """
    largest = max((math.prod(shape) for shape in matrices), default=0)
    units: list[tuple[int, Unit]] = []
    for shape, members in matrices.items():
        entries = math.prod(shape)
        turns = math.ceil(len(members) / (ranks * max(largest // entries, 1)))
        together = math.ceil(len(members) / (ranks * turns))
        groups = [members[first : first + together] for first in range(0, len(members), together)]
        units += [(entries * len(group), group) for group in groups]
    units.sort(key=lambda unit: -unit[0])
    return [[unit for _, unit in units[first : first + ranks]] for first in range(0, len(units), ranks)]


class OwnedMatrices:
    """The matrices of some shards, dealt out to the ranks of this process's place on pp."""

    def __init__(self, shards: Mapping[int, LocalShard], grid: Grid, shards_per_node: int) -> None:
        """shards: by the numbers that ``Matrix`` has; parameters of two dims, or stacks of experts, of three.
        shards_per_node: as in [overlap]. Every process calls this."""
        self.shards, self.axis = dict(shards), grid.stage()
        parts = {shard.name: SavedPart(shard, shard.local) for shard in shards.values()}
        holders = _Holders(own_layout(parts, grid, shards_per_node), self.axis)
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        for number, shard in self.shards.items():
            *stack, rows, columns = shard.global_shape
            assert holders.part(shard.name, self.axis.rank) == shard.slices, f"{shard.name} is elsewhere"
            experts = range(stack[0]) if stack else [None]
            by_shape.setdefault((rows, columns), []).extend(Matrix(number, expert) for expert in experts)
        self.rounds = [self._round(units, holders) for units in deal(by_shape, self.axis.size)]

    def transform(
        self,
        part_of: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        take: Callable[[Matrix, Tensor], None],
        empty: Tensor,
    ) -> None:
        """Give ``take`` this rank's part of ``function`` of every matrix.

        part_of: the part of a matrix that this rank has. function: of several whole matrices [B, rows, columns]. empty:
        without entries, of the type and on the device of what ``part_of`` returns. All matrices that ``part_of`` and
        ``take`` get are this rank's, and their experts are numbered as in its shard. Every process calls this.
        """
        for each in self.rounds:
            whole_BMN = self._gathered(each, part_of, empty)
            if each.owned:
                whole_BMN = function(whole_BMN)
            results = _flat(whole_BMN, each)
            del whole_BMN
            back = self._send(results, each.returned_sizes, each.held_sizes, "optimizer: updates of matrices")
            self._spread(each, back, take)
            del results, back

    def _gathered(self, each: Round, part_of: Callable[[Matrix], Tensor], empty: Tensor) -> Tensor:
        """The matrices that a rank owns, whole."""
        parts = empty.new_empty(sum(each.sent_sizes))
        for matrix, entries in zip(each.sent, parts.split(self._sizes(each.sent)), strict=True):
            part = part_of(matrix)
            entries.view(part.shape).copy_(part)
        arrived = self._send(parts, each.sent_sizes, each.arriving_sizes, "optimizer: matrices to their owners")
        whole_BMN = empty.new_empty(each.owned, *each.shape)
        for target, entries in _in_place(whole_BMN, each.arriving, arrived):
            target.copy_(entries)
        return whole_BMN

    def _spread(self, each: Round, back: Tensor, take: Callable[[Matrix, Tensor], None]) -> None:
        for matrix, part in zip(each.held, back.split(self._sizes(each.held)), strict=True):
            take(matrix, part.view(part_shape(self.shards[matrix.shard])))

    def _sizes(self, matrices: Sequence[Matrix]) -> list[int]:
        """Entries of this rank's parts."""
        return [math.prod(part_shape(self.shards[matrix.shard])) for matrix in matrices]

    def _send(self, parts: Tensor, sent: list[int], received: list[int], why: str) -> Tensor:
        return parts if self.axis.size == 1 else send_rows(parts, self.axis, sent, received, why)

    def _round(self, units: Sequence[Unit], holders: _Holders) -> Round:
        me, ranks = self.axis.rank, self.axis.size
        own = units[me] if me < len(units) else []
        *_, rows, columns = self.shards[own[0].shard].global_shape if own else (0, 0)
        found = Round((rows, columns), len(own), sent_sizes=[0] * ranks, held_sizes=[0] * ranks)
        for owner, unit in enumerate(units):
            for matrix in unit:
                shard = self.shards[matrix.shard]
                part, entries = holders.bounds(shard.name, matrix.expert, me), math.prod(part_shape(shard))
                if part is None:
                    continue
                here = matrix
                if matrix.expert is not None:
                    here = Matrix(matrix.shard, matrix.expert - shard.slices[0].start)
                found.held.append(here)
                found.held_sizes[owner] += entries
                if holders.nearest(shard.name, matrix.expert, part, owner) == me:
                    found.sent.append(here)
                    found.sent_sizes[owner] += entries
        arriving: list[list[tuple[int, Bounds]]] = [[] for _ in range(ranks)]
        returned: list[list[tuple[int, Bounds]]] = [[] for _ in range(ranks)]
        for slot, matrix in enumerate(own):
            name = self.shards[matrix.shard].name
            for part, copies in holders.of(name, matrix.expert).items():
                arriving[holders.nearest(name, matrix.expert, part, me)].append((slot, part))
                for rank in copies:
                    returned[rank].append((slot, part))
        found.arriving, found.returned = (list(itertools.chain(*each)) for each in (arriving, returned))
        found.arriving_sizes, found.returned_sizes = (
            [sum(_entries(part) for _, part in parts) for parts in each] for each in (arriving, returned)
        )
        return found


def part_shape(shard: LocalShard) -> tuple[int, ...]:
    """The shape of a process's part of a matrix of a shard."""
    return tuple(shard.local.shape[-2:])


class _Holders:
    """The ranks that hold each part of each matrix; matrices that are cut alike have them in common."""

    def __init__(self, layout: CheckpointTensors, axis: Axis) -> None:
        self.layout, self.axis = layout, axis
        sizes = layout.sizes
        self._first = next(iter(layout.tensors.values())).pp * axis.size if layout.tensors else 0
        self._places = list(itertools.product(*(range(sizes[name]) for name in sizes if name != "pp")))
        first_of: dict[tuple[object, ...], str] = {}
        self._alike = {
            name: first_of.setdefault((t.shape, t.x, t.y, t.ep, t.sharded, t.sharded_dim), name)
            for name, t in layout.tensors.items()
        }
        self._of, self._all_parts = cache(self._find), cache(self._parts)

    def part(self, name: str, rank: int) -> tuple[slice, ...]:
        """The part of a tensor that a rank of the axis holds."""
        return self.layout.part_of(name, self._first + rank)

    def of(self, name: str, expert: int | None) -> Mapping[Bounds, list[int]]:
        """The parts of a matrix, each with the ranks that hold it."""
        return self._of(self._alike[name], expert)

    def bounds(self, name: str, expert: int | None, rank: int) -> Bounds | None:
        """The part of a matrix that a rank holds; None where that is nothing."""
        return _bounds(self._all_parts(self._alike[name])[rank], expert)

    def nearest(self, name: str, expert: int | None, part: Bounds, owner: int) -> int:
        """The rank that sends a part to the owner: of those that hold it the one with the owner's place on most of the
        outer axes."""
        place = self._places[owner]
        return min(
            self.of(name, expert)[part],
            key=lambda rank: [a != b for a, b in zip(self._places[rank], place, strict=True)],
        )

    def _parts(self, name: str) -> list[tuple[slice, ...]]:
        return [self.part(name, rank) for rank in range(self.axis.size)]

    def _find(self, name: str, expert: int | None) -> dict[Bounds, list[int]]:
        found: dict[Bounds, list[int]] = {}
        for rank, part in enumerate(self._all_parts(name)):
            bounds = _bounds(part, expert)
            if bounds is not None:
                found.setdefault(bounds, []).append(rank)
        return found


def _bounds(part: tuple[slice, ...], expert: int | None) -> Bounds | None:
    *experts, rows, columns = part
    if expert is not None and not experts[0].start <= expert < experts[0].stop:
        return None
    bounds = (rows.start, rows.stop), (columns.start, columns.stop)
    return bounds if _entries(bounds) else None


def _entries(part: Bounds) -> int:
    return math.prod(stop - start for start, stop in part)


def _flat(whole_BMN: Tensor, each: Round) -> Tensor:
    """The parts that an owner returns, one after the other."""
    results = whole_BMN.new_empty(sum(each.returned_sizes))
    for source, entries in _in_place(whole_BMN, each.returned, results):
        entries.copy_(source)
    return results


def _in_place(
    matrices_BMN: Tensor, places: Sequence[tuple[int, Bounds]], entries: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of whole matrices, each with its entries, which stand one after the other."""
    for (slot, part), values in zip(places, entries.split([_entries(part) for _, part in places]), strict=True):
        target = matrices_BMN[slot][tuple(slice(*each) for each in part)]
        yield target, values.view(target.shape)
