"""Measure lower limits for the time of a training step.

There are three limits: the time of the step's computation, of its collectives, and of its matmuls and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.peers import Step
from fourfold.parallel.data import fsdp_on_gloo
from fourfold.parallel.grid import communicate
from fourfold.verification.durations import PRODUCTS, is_attention

COLLECTIVES = {
    "all_gather": [(communicate, "all_gather_single"), (fsdp_on_gloo, "all_gather_single")],
    "all_reduce": [(dist, "all_reduce")],
    "all_to_all": [(dist, "all_to_all_single")],
}
"""The functions that run each kind of collective on gloo. Collectives over cp, over pp, and between experts use other
functions, which are not listed."""


class Collective(NamedTuple):
    """A recorded collective of a step: the function that was called, its tensors' shapes and dtypes, and its group.
    With these, the collective can run again."""

    call: Callable[..., Any]
    shapes: list[tuple[torch.Size, torch.dtype]]
    group: dist.ProcessGroup | None


class Done:
    """The work handle of a collective that is already complete."""

    def wait(self) -> bool:
        return True


class RecordedProducts(TorchDispatchMode):
    """Record every call of a matmul or of an attention operation inside this context, with copies of its operands."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operator._overloadpacket.__name__
        if name in PRODUCTS or is_attention(name):
            self.calls.append((operator, *tree_map_only(Tensor, Tensor.clone, (args, kwargs))))
        return operator(*args, **kwargs)


def without_communication(step: Step) -> Step:
    """Return a step whose collectives send nothing. Instead of the data of all ranks, they return copies of this rank's
    data."""

    def copy(kind: str, _: Any) -> Callable[..., Done]:
        def collective(out: Tensor, part: Any = None, *rest: Any, **options: Any) -> Done:
            if kind != "all_reduce":
                for place in out.view(-1, part.numel()):
                    # FSDP2 gathers in place, so this rank's own part is already there.
                    if place.data_ptr() != part.data_ptr():
                        place.copy_(part.flatten())
            return Done()

        return collective

    def alone(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        with _replaced(copy):
            return step(tokens_BS, labels_BS)

    return alone


def communication_of(step: Step, batch: tuple[Tensor, Tensor]) -> Step:
    """Return a function that runs only the collectives of a step, one after another."""
    collectives: list[Collective] = []

    def record(kind: str, call: Any) -> Callable[..., Any]:
        def collective(*tensors: Any, **options: Any) -> Any:
            shapes = [(tensor.shape, tensor.dtype) for tensor in tensors if isinstance(tensor, Tensor)]
            collectives.append(Collective(call, shapes, options.get("group")))
            return call(*tensors, **options)

        return collective

    with _replaced(record):
        step(*batch)

    def alone(*_: Tensor) -> Tensor:
        for call, shapes, group in collectives:
            call(*(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes), group=group)
        return torch.zeros(())

    return alone


def products_of(step: Step, batch: tuple[Tensor, Tensor]) -> Step:
    """Return a function that runs only the matmuls and the attention of a step's forward and backward passes, one after
    another."""
    with RecordedProducts() as products:
        step(*batch)

    def alone(*_: Tensor) -> Tensor:
        for operator, args, kwargs in products.calls:
            operator(*args, **kwargs)
        return torch.zeros(())

    return alone


@contextmanager
def _replaced(make: Callable[[str, Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace each function in ``COLLECTIVES`` with ``make(kind, function)`` while the context is active."""
    with ExitStack() as stack:
        for kind, places in COLLECTIVES.items():
            for module, name in places:
                stack.enter_context(mock.patch.object(module, name, make(kind, getattr(module, name))))
        yield
