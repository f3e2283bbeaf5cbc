"""Activation checkpointing: a method keeps only its inputs, and runs again in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Tensor])

RECOMPUTES: ContextVar[bool] = ContextVar("recomputes", default=False)
"""True while the backward pass runs a method again. This second run only restores the tensors that the method saves.
Nothing reads its output."""

MEMORY: ContextVar[dict[object, Any] | None] = ContextVar("memory", default=None)
"""Values from the first forward pass that the recomputation reuses (``remembered``)."""


def recomputable(method: Method) -> Method:
    """Decorate a method so that ``recompute_method`` can turn on recomputation for it.

    All modules of a class share the decorated method, so torch compiles it only once.
    """
    name = method.__name__

    @wraps(method)
    def run(self: nn.Module, *inputs: Any) -> Tensor:
        if is_recomputed(self, name):
            return checkpointed(partial(method, self), *inputs)
        return method(self, *inputs)

    return run  # type: ignore[return-value]  # a function of the same signature


def recompute_method(module: nn.Module, name: str) -> None:
    """Turn on recomputation for one ``recomputable`` method of a module."""
    module.recomputed_method = name  # type: ignore[assignment]  # torch declares every attribute a tensor or a module


def is_recomputed(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, "recomputed_method", "") == name)


def checkpointed(forward: Callable[..., T], *inputs: Any) -> T:
    """Call a function, keep only its inputs, and call the function again in the backward pass."""
    # Blocks have no random operations, so there is no random state to restore.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if not torch.compiler.is_compiling():  # Compiled code cannot enter this context, and does not need it.
        options["context_fn"] = _first_and_again
    out: T = checkpoint(forward, *inputs, **options)
    return out


def remembered(owner: object, compute: Callable[[], T]) -> T:
    """Return ``compute()``. In a recomputation, return the value from the first forward pass instead.

    Args:
        owner: the key under which the value is stored.
        compute: computes a value that needs no gradient.
    """
    memory = MEMORY.get()
    if memory is None:
        return compute()
    if not RECOMPUTES.get():
        memory[owner] = compute()
    value: T = memory[owner]
    return value


def _first_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    memory: dict[object, Any] = {}
    return _running(memory, again=False), _running(memory, again=True)


@contextmanager
def _running(memory: dict[object, Any], again: bool) -> Iterator[None]:
    tokens = MEMORY.set(memory), RECOMPUTES.set(again)
    try:
        yield
    finally:
        MEMORY.reset(tokens[0])
        RECOMPUTES.reset(tokens[1])
