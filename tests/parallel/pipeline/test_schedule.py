"""The lists of operations of every schedule are complete, and can run in their order. Ranks idle for as long as the
papers say."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import get_args

import pytest
from torch.distributed import pipelining

from benchmarks.pipeline_times import bubble, timeline
from fourfold.config.run import ParallelConfig, PipelineSchedule
from fourfold.config.stages import SPLIT_BACKWARD, balanced, rank_of_stage, stages_per_rank
from fourfold.parallel.pipeline.schedule import Op, schedule_ops, with_transfers

SCHEDULES = get_args(PipelineSchedule)
CASES = [
    (schedule, pp, m)
    for schedule in SCHEDULES
    for pp in (2, 4)
    for m in (1, pp, 2 * pp, 4 * pp, 3 * pp + 1)
    # Leave out the combinations that fourfold.config.layout refuses.
    if not (schedule == "DualPipeV" and m < 2 * pp)
    if not (schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and m % max(1, m // pp))
]


def in_flight(ops: list[Op]) -> int:
    """Return the largest number of forwards that still wait for their backward."""
    most = now = 0
    for op in ops:
        now += {"F": 1, "B": -1, "I": -1}.get(op.kind, 0)
        most = max(most, now)
    return most


def test_the_schedules_match_torch() -> None:
    """This fails if a new release of torch brings another schedule."""
    of_torch = {name.removeprefix("Schedule") for name in pipelining.__all__ if name.startswith("Schedule")}
    assert of_torch == set(SCHEDULES)


@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), CASES)
def test_every_stage_runs_every_micro_batch_once(schedule: str, pp: int, micro_batches: int) -> None:
    grid = ParallelConfig(pp=pp, schedule=schedule)
    lists = schedule_ops(grid, micro_batches)
    assert len(lists) == pp
    for rank, ops in enumerate(lists):
        assert all(rank_of_stage(op.stage, grid) == rank for op in ops)
    seen = Counter(op for ops in lists for op in ops)
    assert set(seen.values()) == {1}
    for stage in range(pp * stages_per_rank(grid)):
        for i in range(micro_batches):
            kinds = {kind for kind in ("F", "B", "I", "W") if Op(kind, stage, i) in seen}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
            assert kinds == {"F", "B"} or schedule in SPLIT_BACKWARD


@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), CASES)
def test_both_sides_of_a_transfer_agree_on_the_order(schedule: str, pp: int, micro_batches: int) -> None:
    """For each pair of ranks and each direction, one rank receives in the order that its peer sends, and every
    message is received."""
    grid = ParallelConfig(pp=pp, schedule=schedule)
    sent: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for rank, ops in enumerate(with_transfers(schedule_ops(grid, micro_batches), grid)):
        for op in ops:
            way, _, what = op.kind.partition("_")
            if not what:
                continue
            step = (1 if what == "F" else -1) * (1 if way == "SEND" else -1)
            other = rank_of_stage(op.stage + step, grid)
            assert other != rank, "stages of one rank need no transfer"
            if way == "SEND":
                sent.setdefault((what, rank, other), []).append((op.stage + step, op.micro_batch))
            else:
                received.setdefault((what, other, rank), []).append((op.stage, op.micro_batch))
    assert sent == received
    borders = [s for s in range(pp * stages_per_rank(grid) - 1) if rank_of_stage(s, grid) != rank_of_stage(s + 1, grid)]
    assert sum(map(len, sent.values())) == 2 * len(borders) * micro_batches


@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), CASES)
def test_two_ranks_see_their_transfers_in_one_order(schedule: str, pp: int, micro_batches: int) -> None:
    """If transfers in both directions run in one order, no two ranks wait forever for each other's next transfer."""
    grid = ParallelConfig(pp=pp, schedule=schedule)
    queues: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for rank, ops in enumerate(with_transfers(schedule_ops(grid, micro_batches), grid)):
        for op in ops:
            way, _, what = op.kind.partition("_")
            if what:
                ahead = 1 if what == "F" else -1
                writer = op.stage if way == "SEND" else op.stage - ahead
                other = rank_of_stage(writer + ahead if way == "SEND" else writer, grid)
                queues.setdefault((rank, other), []).append((what, writer, op.micro_batch))
    for (rank, other), queue in queues.items():
        assert queue == queues[other, rank]


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_one_stage_per_rank_idles_by_the_formula(schedule: str, pp: int, micro_batches: int) -> None:
    """The idle fraction is (p − 1)/(m + p − 1), as in Narayanan et al. 2021 (arXiv 2104.04473), whatever a backward
    costs."""
    grid = ParallelConfig(pp=pp, schedule=schedule)
    for backward in (1.0, 2.0, 3.0):
        spans = timeline(schedule_ops(grid, micro_batches), grid, backward)
        assert bubble(spans) == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(
    schedule: str, chunks: int, micro_batches: int
) -> None:
    """A rank works for the time of m micro-batches, and is idle for the time of (p − 1)/v micro-batches (Narayanan et
    al. 2021, section 2.2)."""
    grid = ParallelConfig(pp=4, schedule=schedule, stages_per_rank=chunks)
    waiting = 3 / chunks
    assert bubble(timeline(schedule_ops(grid, micro_batches), grid)) == pytest.approx(
        waiting / (micro_batches + waiting)
    )


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_weight_gradients_fill_the_bubble(schedule: str) -> None:
    """From 2·pp micro-batches on, ranks idle for less than half as long as with interleaving."""
    for micro_batches in (8, 16):
        grid = ParallelConfig(pp=4, schedule=schedule)
        interleaved = ParallelConfig(pp=4, schedule="Interleaved1F1B")
        idle, other = (bubble(timeline(schedule_ops(g, micro_batches), g)) for g in (grid, interleaved))
        assert 0 < idle < other / 2


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 12])
def test_micro_batches_in_flight(pp: int, micro_batches: int) -> None:
    gpipe = schedule_ops(ParallelConfig(pp=pp, schedule="GPipe"), micro_batches)
    assert [in_flight(ops) for ops in gpipe] == [micro_batches] * pp
    ones = schedule_ops(ParallelConfig(pp=pp), micro_batches)
    assert [in_flight(ops) for ops in ones] == [min(pp - rank, micro_batches) for rank in range(pp)]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("GPipe", "LoopedBFS")])
def test_micro_batches_in_flight_do_not_grow_with_their_number(schedule: str) -> None:
    grid = ParallelConfig(pp=4, schedule=schedule)
    some, more = ([in_flight(ops) for ops in schedule_ops(grid, m)] for m in (16, 32))
    assert some == more


def test_the_first_backward_of_the_last_stage_follows_its_forward() -> None:
    ops = schedule_ops(ParallelConfig(pp=4), 8)[3]
    assert ops == [Op(kind, 3, i) for i in range(8) for kind in ("F", "B")]


@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_a_timeline_keeps_to_what_an_operation_needs(backward: float) -> None:
    for schedule in SCHEDULES:
        grid = ParallelConfig(pp=4, schedule=schedule)
        spans = timeline(schedule_ops(grid, 8), grid, backward)
        ends = {span.op: span.end for rank in spans for span in rank}
        for rank in spans:
            for before, after in pairwise(rank):
                assert after.begin >= before.end, "a rank does one thing at a time"
            for span in rank:
                kind, stage, i = span.op
                if kind == "F" and stage > 0:
                    assert span.begin >= ends[Op("F", stage - 1, i)]
                if kind in ("B", "I"):
                    assert span.begin >= ends[Op("F", stage, i)]
                    if stage < 4 * stages_per_rank(grid) - 1:
                        gradient = [Op(k, stage + 1, i) for k in ("B", "I") if Op(k, stage + 1, i) in ends]
                        assert span.begin >= min(ends[op] for op in gradient)
                if kind == "W":
                    assert span.begin >= ends[Op("I", stage, i)]


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "expected"),
    [
        (8, 4, 0.0, 0.0, (2, 2, 2, 2)),
        (10, 4, 0.0, 0.0, (2, 3, 3, 2)),
        (32, 4, 2.4, 2.4, (7, 9, 9, 7)),
        (4, 4, 9.0, 9.0, (1, 1, 1, 1)),
    ],
)
def test_layers_are_evened_out(layers: int, stages: int, first: float, last: float, expected: tuple[int, ...]) -> None:
    assert balanced(layers, stages, first, last) == expected


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.7, 0.7), (2.4, 2.4), (1.0, 5.0)])
def test_no_other_split_has_a_smaller_largest_stage(ends: tuple[float, float]) -> None:
    first, last = ends
    for layers in range(3, 13):
        counts = balanced(layers, 3, first, last)
        largest = max(counts[0] + first, counts[1], counts[2] + last)
        splits = [(a, b, layers - a - b) for a in range(1, layers - 1) for b in range(1, layers - a)]
        assert sum(counts) == layers
        assert largest == pytest.approx(min(max(a + first, b, c + last) for a, b, c in splits))


def test_schedules_that_are_written_out_need_no_torch() -> None:
    """Importing torch takes seconds. Code that reads only these schedules should not have to wait for it."""
    code = (
        "import sys; from fourfold.config.run import ParallelConfig; from fourfold.parallel.pipeline import schedule; "
        "[schedule.schedule_ops(ParallelConfig(pp=2, schedule=name), 4) for name in ('GPipe', '1F1B')]; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
