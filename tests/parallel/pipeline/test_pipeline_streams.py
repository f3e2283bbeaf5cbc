"""On GPUs, NCCL runs the transfers of one group in the order that they were issued. Simulate schedules under this
rule: one group per pair of neighbors adds no bubble, and one group of all stages adds a large bubble."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

import pytest

from benchmarks.pipeline_times import bubble, timeline
from fourfold.config.run import ParallelConfig
from fourfold.config.stages import rank_of_stage, stages_per_rank
from fourfold.parallel.pipeline.schedule import Op, schedule_ops, with_transfers

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Group = Callable[[int, int], Hashable]


def of_pairs(sender: int, receiver: int) -> Hashable:
    return frozenset((sender, receiver))


def of_all(sender: int, receiver: int) -> Hashable:
    return "pp"


class Streams:
    """The streams of all ranks: one that computes, and one for each group.

    The host issues all operations of a rank at once. A transfer takes no time. It begins when both of its ranks have
    finished the computations that were issued before it, and when their streams for the transfer's group have finished
    all earlier transfers. A computation waits for the transfer that it reads. A send waits for the previous send to the
    same rank.
    """

    def __init__(self, grid: ParallelConfig, micro_batches: int, group: Group) -> None:
        self.grid, self.group = grid, group
        self.lists = with_transfers(schedule_ops(grid, micro_batches), grid)
        self.computed = [0.0] * grid.pp
        """Time when each rank's computing stream has finished what was issued."""
        self.issued: list[dict[Hashable, deque[tuple[Op, float]]]] = [defaultdict(deque) for _ in self.lists]
        """For each rank and group, the transfers that have not begun, each with the time when it was issued. On both
        ranks, the sender's operation identifies the transfer."""
        self.done: list[dict[Hashable, float]] = [defaultdict(float) for _ in self.lists]
        self.arrived: dict[Op, float] = {}
        self.last_sent: dict[tuple[str, tuple[int, int]], Op] = {}

    def bubble(self) -> float:
        """Run the operations of all ranks. Return the fraction of the ranks' time without computation."""
        left = [deque(ops) for ops in self.lists]
        while any(left):
            moved = self.transfer()
            for rank, ops in enumerate(left):
                while ops and self.issue(rank, ops[0]):
                    ops.popleft()
                    moved = True
            assert moved, "every rank waits for another"
        busy = sum(SECONDS[op.kind] for ops in self.lists for op in ops if op.kind in SECONDS)
        return 1 - busy / stages_per_rank(self.grid) / (self.grid.pp * max(self.computed))

    def issue(self, rank: int, op: Op) -> bool:
        """Issue one operation. Return False if the operation must wait for a transfer that has not begun yet."""
        if op.kind in SECONDS:
            needed = self.received(rank, op)
            if needed is not None and needed not in self.arrived:
                return False
            begin = max(self.computed[rank], self.arrived[needed] if needed else 0.0)
            self.computed[rank] = begin + SECONDS[op.kind] / stages_per_rank(self.grid)
        else:
            sent = op if op.kind.startswith("SEND") else sender_of(op)
            if sent == op:
                before = self.last_sent.get((op.kind, self.ends(op)))
                if before is not None and before not in self.arrived:
                    return False
                self.last_sent[op.kind, self.ends(op)] = op
                self.computed[rank] = max(self.computed[rank], self.arrived[before] if before else 0.0)
            self.issued[rank][self.group(*self.ends(sent))].append((sent, self.computed[rank]))
        return True

    def transfer(self) -> bool:
        """Begin the transfers that are next in their group on both ranks. Return whether there were any."""
        moved = False
        for queues in self.issued:
            for name, queue in queues.items():
                while queue:
                    op, _ = queue[0]
                    sender, receiver = self.ends(op)
                    both = [self.issued[rank][name] for rank in (sender, receiver)]
                    if not all(each and each[0][0] == op for each in both):
                        break
                    times = [each.popleft()[1] for each in both] + [
                        self.done[rank][name] for rank in (sender, receiver)
                    ]
                    self.arrived[op] = self.done[sender][name] = self.done[receiver][name] = max(times)
                    moved = True
        return moved

    def received(self, rank: int, op: Op) -> Op | None:
        """Return the transfer that a computation waits for, or None."""
        last = self.grid.pp * stages_per_rank(self.grid) - 1
        if op.kind == "F" and op.stage > 0:
            sent = Op("SEND_F", op.stage - 1, op.micro_batch)
        elif op.kind in ("B", "I") and op.stage < last:
            sent = Op("SEND_B", op.stage + 1, op.micro_batch)
        else:
            return None
        return sent if rank_of_stage(sent.stage, self.grid) != rank else None

    def ends(self, sent: Op) -> tuple[int, int]:
        to = sent.stage + (1 if sent.kind == "SEND_F" else -1)
        return rank_of_stage(sent.stage, self.grid), rank_of_stage(to, self.grid)


def sender_of(op: Op) -> Op:
    if op.kind == "RECV_F":
        return Op("SEND_F", op.stage - 1, op.micro_batch)
    return Op("SEND_B", op.stage + 1, op.micro_batch)


@pytest.mark.parametrize(
    "schedule",
    ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (3, 6), (4, 16), (5, 20), (8, 32)])
def test_a_group_for_each_pair_costs_no_bubble(schedule: str, pp: int, micro_batches: int) -> None:
    grid = ParallelConfig(pp=pp, schedule=schedule)
    listed = bubble(timeline(schedule_ops(grid, micro_batches), grid))
    assert Streams(grid, micro_batches, of_pairs).bubble() == pytest.approx(listed, abs=0.01)


def test_one_group_for_all_does() -> None:
    grid = ParallelConfig(pp=8, schedule="Interleaved1F1B")
    listed = bubble(timeline(schedule_ops(grid, 32), grid))
    assert Streams(grid, 32, of_all).bubble() > listed + 0.15
