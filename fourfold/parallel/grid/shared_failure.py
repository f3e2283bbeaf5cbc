"""Raise one process's failure on all processes, and share small values between them."""

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
    """If the ``with`` block raises a ``UserError`` on any process, raise it on all processes at the end of the block.

    Otherwise the other processes would wait for the failed process, and finally report only that it has left. Every
    process must enter the block, and the block must not call collectives.
    """
    failure = None
    try:
        yield
    except UserError as error:
        failure = error
    raise_together(failure)


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every process.

    If the function raises a ``UserError``, all processes raise it.
    """
    found: list[Any] = [None]
    with failing_together():
        if dist.get_rank() == 0:
            found = [decide()]
    dist.broadcast_object_list(found, src=0)
    decided: T = found[0]
    return decided


def raise_together(failure: UserError | None) -> None:
    """If any process passes a failure, raise it on all processes. If several processes do, raise the failure of the
    lowest rank.

    All processes must call this. If no process fails, the call costs one all-reduce of a scalar.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if true_on_any_rank(failure is not None, torch.device(device), "failures"):
        raise next(each for each in from_all_ranks(failure, "failures") if each is not None) from failure


def true_on_any_rank(flag: bool, device: torch.device, why: str) -> bool:
    """Return whether the flag is true on any rank. Every rank must call this, and all get the same result.

    Args:
        flag: this rank's flag.
        device: the device for the collective.
        why: what the collective is for.
    """
    found = torch.tensor(float(flag), device=device)
    with purpose(why):
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def from_all_ranks(value: T, why: str) -> list[T]:
    """Return the values of all ranks, in rank order. Every rank must call this.

    Args:
        value: this rank's value.
        why: what the collective is for.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    with purpose(why):
        dist.all_gather_object(everyone, value)
    return everyone
