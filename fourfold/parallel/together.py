"""A failure of one process, raised on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fourfold.errors import UserError
from fourfold.parallel.communicate import purpose


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


def raise_together(failure: UserError | None) -> None:
    """Raise the failure of the first process that has one on all processes, which all call this."""
    everyone: list[UserError | None] = [None] * dist.get_world_size()
    with purpose("failures"):
        dist.all_gather_object(everyone, failure)
    first = next((each for each in everyone if each is not None), None)
    if first is not None:
        raise first from failure
