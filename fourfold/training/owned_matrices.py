"""Gather each sharded matrix on one rank, for computations that need the full matrix (Muon).

Each matrix of a pipeline stage has an owner, one of the stage's ranks. The matrices are divided so that all ranks have
about the same work. A *part* of a matrix is the block of rows and columns that a rank holds. The work is done in
rounds. In each round, every rank

1. gathers the matrices that it owns in this round (an all-to-all)
2. transforms these matrices
3. sends the parts of the results back to the ranks that hold these parts (another all-to-all)

If several ranks hold copies of a part, only the rank nearest to the owner sends it. On every grid, each matrix is
transformed exactly once, by its owner, with the same values as on one process.
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
"""Bounds of a part of a matrix: (first row, last row + 1), (first column, last column + 1)."""
Unit = Sequence["Matrix"]
"""The matrices that one rank owns in a round. All of them have the same shape."""


class Matrix(NamedTuple):
    """One matrix: a parameter, identified by the index of its shard, or one expert of a stack of experts."""

    shard: int
    expert: int | None = None


@dataclass
class Round:
    """What one rank sends, receives, and owns in a round.

    In the first all-to-all, the rank sends its parts of the matrices in ``sent`` to their owners. It receives the parts
    in ``arriving``, which are parts of the matrices that it owns. In the second all-to-all, the rank sends the parts in
    ``returned``, which are parts of the results that it computed. It receives its own parts of the results for the
    matrices in ``held``. An entry of ``arriving`` or ``returned`` is a pair: the index of an owned matrix, and the
    bounds of the part. The lists of sizes have one entry per rank: the number of elements to send to this rank, or to
    receive from it.
    """

    shape: tuple[int, int]
    owned: int
    """Number of matrices that the rank owns. Each of them has the shape ``shape``."""
    sent: list[Matrix] = field(default_factory=list)
    """Matrices whose part this rank sends to the owner."""
    held: list[Matrix] = field(default_factory=list)
    """Matrices that this rank holds a part of."""
    arriving: list[tuple[int, Bounds]] = field(default_factory=list)
    returned: list[tuple[int, Bounds]] = field(default_factory=list)
    sent_sizes: list[int] = field(default_factory=list)
    arriving_sizes: list[int] = field(default_factory=list)
    returned_sizes: list[int] = field(default_factory=list)
    held_sizes: list[int] = field(default_factory=list)


def deal(matrices: Mapping[tuple[int, int], Sequence[Matrix]], ranks: int) -> list[list[Unit]]:
    """Divide the matrices into units, and return the units of each round. In each round, rank i owns the i-th unit.

    A unit is one large matrix, or several small matrices of the same shape. No unit is larger than the largest matrix,
    so the memory of a round is bounded. The first rounds have the largest units, so the units of a round take about the
    same time.

    Args:
        matrices: The matrices, by shape.
        ranks: Number of ranks.
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
    """The matrices of some shards, each owned by one rank of this pipeline stage."""

    def __init__(self, shards: Mapping[int, LocalShard], grid: Grid, shards_per_node: int) -> None:
        """Divide the matrices among the ranks. Every process calls this.

        Args:
            shards: Matrices [rows, columns] and stacks of experts [experts, rows, columns]. The keys are the indices in
                ``Matrix.shard``.
            grid: The grid of processes.
            shards_per_node: The value of ``overlap.shards_per_node``.
        """
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
        """Apply a function to every full matrix, and give each rank its part of the results. Every process calls this.

        Args:
            part_of: Returns this rank's part of a matrix. ``Matrix.expert`` is here the index within this rank's shard.
            function: Maps a stack of full matrices [B, rows, columns] to results of the same shape.
            take: Called for each matrix that this rank has a part of, with the matrix and this rank's part of the
                result. ``Matrix.expert`` is the same index as for ``part_of``.
            empty: An empty tensor with the dtype and device of the tensors that ``part_of`` returns.
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
        """Gather the matrices that this rank owns in a round, and return them as [B, rows, columns]."""
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
        """Call ``take`` with this rank's part of each result of a round. When this method returns, its views of
        ``back`` are freed, so the next round can use their memory."""
        for matrix, part in zip(each.held, back.split(self._sizes(each.held)), strict=True):
            take(matrix, part.view(part_shape(self.shards[matrix.shard])))

    def _sizes(self, matrices: Sequence[Matrix]) -> list[int]:
        """Return the number of elements in this rank's part of each matrix."""
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
    """Return the shape of this process's part of each matrix in a shard."""
    return tuple(shard.local.shape[-2:])


class _Holders:
    """Knows which ranks hold which parts of each matrix. The answer is computed once for all matrices with the same
    layout."""

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
        """Return the part of a tensor (one slice per dim) that a rank of this pipeline stage holds."""
        return self.layout.part_of(name, self._first + rank)

    def of(self, name: str, expert: int | None) -> Mapping[Bounds, list[int]]:
        """Return all parts of a matrix, each with the ranks that hold this part."""
        return self._of(self._alike[name], expert)

    def bounds(self, name: str, expert: int | None, rank: int) -> Bounds | None:
        """Return the bounds of the part of a matrix that a rank holds, or None if the rank holds no part of it."""
        return _bounds(self._all_parts(self._alike[name])[rank], expert)

    def nearest(self, name: str, expert: int | None, part: Bounds, owner: int) -> int:
        """Return the rank that sends a part to the owner.

        Among the ranks with this part, it is the rank nearest to the owner on the grid. Positions on the outer axes are
        compared first.
        """
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
    """Copy the parts of the results that this rank sends in the second all-to-all into one flat tensor."""
    results = whole_BMN.new_empty(sum(each.returned_sizes))
    for source, entries in _in_place(whole_BMN, each.returned, results):
        entries.copy_(source)
    return results


def _in_place(
    matrices_BMN: Tensor, places: Sequence[tuple[int, Bounds]], entries: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide the flat ``entries`` among parts of the full matrices. Yield each part (a view of its matrix) and its
    section of ``entries``."""
    for (slot, part), values in zip(places, entries.split([_entries(part) for _, part in places]), strict=True):
        target = matrices_BMN[slot][tuple(slice(*each) for each in part)]
        yield target, values.view(target.shape)
