"""List the operations of each pipeline rank, in order, for the schedules of torch.distributed.pipelining."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from fourfold.config.run import ParallelConfig
from fourfold.config.stages import rank_of_stage, stages_per_rank

OpKind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Kinds of operations.

F is a forward pass and B a backward pass. Some schedules split B into I (input gradients) and W (weight gradients).
SEND_F and RECV_F transfer hidden states. SEND_B and RECV_B transfer the gradients of hidden states.
"""


class Op(NamedTuple):
    """One operation of one stage on one micro-batch."""

    kind: OpKind
    stage: int
    micro_batch: int


def schedule_ops(grid: ParallelConfig, micro_batches: int) -> list[list[Op]]:
    """Return the computations of each pipeline rank, in order, without transfers.

    This module implements GPipe (Huang et al. 2019, arXiv 1811.06965) and 1F1B (Narayanan et al. 2019). All other
    schedules come from torch.
    """
    ranks = range(grid.pp)
    if grid.pp == 1:
        return [_one_forward_one_backward(0, 1, micro_batches)]
    if grid.schedule == "GPipe":
        return [[Op(kind, rank, i) for kind in ("F", "B") for i in range(micro_batches)] for rank in ranks]
    if grid.schedule == "1F1B":
        return [_one_forward_one_backward(rank, grid.pp, micro_batches) for rank in ranks]
    # Import torch only here, so that the schedules above work without it.
    from fourfold.torch_internals import schedule_actions

    lists = schedule_actions(grid.schedule, grid.pp, micro_batches, stages_per_rank(grid))
    return [[op for action in actions for op in _flat(action)] for actions in lists]


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Op]:
    """Return a rank's operations in the 1F1B schedule.

    The rank runs forward passes until its first backward pass can start. Then forward and backward passes alternate.
    """
    ahead = min(pp - 1 - rank, micro_batches)
    ops = [Op("F", rank, i) for i in range(ahead)]
    for i in range(micro_batches):
        if ahead + i < micro_batches:
            ops.append(Op("F", rank, ahead + i))
        ops.append(Op("B", rank, i))
    return ops


def _flat(action: Any) -> list[Op]:
    """Convert one of torch's actions to operations.

    The action of an idle rank is None, and becomes no operation. An action that overlaps a forward and a backward pass
    becomes several operations.
    """
    if action is None:
        return []
    if action.sub_actions is not None:
        return [op for sub_action in action.sub_actions for op in _flat(sub_action)]
    kind = action.computation_type.value
    return [Op(kind, action.stage_index, action.microbatch_index)] if kind in ("F", "B", "I", "W") else []


def with_transfers(ops: Sequence[Sequence[Op]], grid: ParallelConfig) -> list[list[Op]]:
    """Insert sends and receives between the computations.

    This function simulates all ranks together. If another rank needs the result of an operation, the function adds a
    send to the list of the rank with the result, and a receive to the list of the rank that needs it. So any two ranks
    list the transfers between them in the same order, and cannot deadlock.
    """
    whole: list[list[Op]] = [[] for _ in ops]

    def run(rank: int, op: Op) -> None:
        whole[rank].append(op)
        to = _reader(op, grid)
        if to is not None and (other := rank_of_stage(to, grid)) != rank:
            whole[rank].append(Op("SEND_F" if op.kind == "F" else "SEND_B", op.stage, op.micro_batch))
            whole[other].append(Op("RECV_F" if op.kind == "F" else "RECV_B", to, op.micro_batch))

    simulate(ops, grid, run)
    return whole


def simulate(ops: Sequence[Sequence[Op]], grid: ParallelConfig, run: Callable[[int, Op], None]) -> None:
    """Call ``run(rank, op)`` for every operation of every rank, in an order that respects all dependencies.

    Each rank's operations stay in order, and every operation comes after the operations whose results it reads.
    """
    waiting = [deque(rank_ops) for rank_ops in ops]
    done: set[Op] = set()
    while any(waiting):
        before = len(done)
        for rank, queue in enumerate(waiting):
            if queue and any(all(n in done for n in alternative) for alternative in alternatives_of(queue[0], grid)):
                op = queue.popleft()
                run(rank, op)
                done.add(op)
        assert len(done) > before, f"the schedule {grid.schedule} waits for itself"


def alternatives_of(op: Op, grid: ParallelConfig) -> list[list[Op]]:
    """Return lists of operations. ``op`` can run as soon as all operations of any one list are done.

    Except in the last stage, a backward pass has two lists. The next stage computes the gradient of its input either
    in B (a full backward pass) or in I (only input gradients).
    """
    stage, i = op.stage, op.micro_batch
    if op.kind == "F":
        return [[Op("F", stage - 1, i)] if stage > 0 else []]
    if op.kind == "W":
        return [[Op("I", stage, i)]]
    if stage == grid.pp * stages_per_rank(grid) - 1:
        return [[Op("F", stage, i)]]
    return [[Op("F", stage, i), Op(kind, stage + 1, i)] for kind in ("B", "I")]


def _reader(op: Op, grid: ParallelConfig) -> int | None:
    """Return the stage that reads the result of an operation, or None if no other stage reads it."""
    last = grid.pp * stages_per_rank(grid) - 1
    if op.kind == "F":
        return op.stage + 1 if op.stage < last else None
    return op.stage - 1 if op.kind in ("B", "I") and op.stage > 0 else None
