"""A failure of one process, raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fourfold.errors import UserError
from fourfold.parallel.grid.communicate import purpose

T = TypeVar("T")


@contextmanager
def failing_together() -> Iterator[None]:
    """Run a block on every process; a ``UserError`` of any of them is raised on all, at the end of the block.

    Without this, the others would wait for the process that failed, and report that it has left. The block has no
    collectives of its own.
    """
    failure = None
    try:
        yield
    except UserError as error:
        failure = error
    raise_together(failure)


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """The result of a function that rank 0 calls, on every process; a ``UserError`` of it is raised on all."""
    found: list[Any] = [None]
    with failing_together():
        if dist.get_rank() == 0:
            found = [decide()]
    dist.broadcast_object_list(found, src=0)
    decided: T = found[0]
    return decided


def raise_together(failure: UserError | None) -> None:
    """Raise the failure of the first process that has one on all processes, which all call this.

    As long as none has, this costs one number a process.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    failed = torch.tensor(float(failure is not None), device=device)
    with purpose("failures"):
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if not failed.item():
            return
        everyone: list[UserError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, failure)
    raise next(each for each in everyone if each is not None) from failure
