"""Typed base classes for autograd functions; torch's have no types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Function(torch.autograd.Function):
    """A differentiable function with one output."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...


class FunctionOfMany(torch.autograd.Function):
    """A differentiable function with several outputs."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> tuple[Tensor, ...]: ...


class Context(Protocol[T]):
    """The context in which a function keeps tensors, and one ``kept`` value, from its forward to its backward."""

    kept: T
    saved_tensors: tuple[Any, ...]
    """Each a tensor, or None where forward saved None."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from compilation: asynchronous collectives cannot be traced."""
    disabled: Callable[P, R] = torch.compiler.disable(function)
    return disabled


class _Differentiable(Function):
    @staticmethod
    def forward(
        ctx: Context[Callable[..., Tensor]],
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[..., Tensor],
        *kept: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.kept = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Context[Callable[..., Tensor]], grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: a recomputation gives them only once
        return ctx.kept(grad, *kept), None, None, *(None for _ in kept)


def differentiable(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[..., Tensor], *kept: Tensor | None
) -> Tensor:
    """forward(x), a linear function whose gradient is ``backward`` of the output's gradient and of ``kept``.

    Tensors that the backward reads are given as ``kept``: one that its closure held would outlive the backward, and a
    forward that is to run again would not drop it.
    """
    return _Differentiable.apply(x, forward, backward, *kept)
