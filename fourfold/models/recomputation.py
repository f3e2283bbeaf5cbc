"""Activation checkpointing: methods that keep only their inputs, and run again in the backward pass."""

from __future__ import annotations

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
"""True while a part of the model is recomputed. The output of this pass is not used."""

MEMORY: ContextVar[dict[object, Any] | None] = ContextVar("memory", default=None)
"""Values that the first forward pass has computed, for the recomputation to reuse."""


def recomputable(method: Method) -> Method:
    """Decorate a method so that ``recompute_method`` can select it. All modules of a class share the method, so it
    compiles only once."""
    name = method.__name__

    @wraps(method)
    def run(self: nn.Module, *inputs: Any) -> Tensor:
        if is_recomputed(self, name):
            return checkpointed(partial(method, self), *inputs)
        return method(self, *inputs)

    return run  # type: ignore[return-value]  # a function of the same signature


def recompute_method(module: nn.Module, name: str) -> None:
    """Make a ``recomputable`` method of this module keep only its inputs, and run again in the backward pass."""
    module.recomputed_method = name  # type: ignore[assignment]  # torch declares every attribute a tensor or a module


def is_recomputed(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, "recomputed_method", "") == name)


def checkpointed(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function, keep only its inputs, and call the function again in the backward pass."""
    # Blocks contain no randomness, so there is no random state to restore.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if not torch.compiler.is_compiling():  # Compiled code cannot enter this context, and does not need it.
        options["context_fn"] = _first_and_again
    out: Tensor = checkpoint(forward, *inputs, **options)
    return out


def remembered(owner: object, compute: Callable[[], T]) -> T:
    """Compute a value that has no gradient, and return it. In a recomputation, return the value from the first forward
    pass instead."""
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
