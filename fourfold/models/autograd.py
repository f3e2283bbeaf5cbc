"""Typed base classes for autograd functions, because torch's classes have no types."""

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
    """The context that carries saved tensors and one ``kept`` value from a function's forward to its backward pass."""

    kept: T
    saved_tensors: tuple[Any, ...]
    """The saved tensors, with None for each None that the forward pass saved."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from compilation, because asynchronous collectives cannot be traced."""
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
        kept = ctx.saved_tensors  # Read this only once, because recomputed tensors can be read only once.
        return ctx.kept(grad, *kept), None, None, *(None for _ in kept)


def differentiable(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[..., Tensor], *kept: Tensor | None
) -> Tensor:
    """Call a linear function, with a custom backward pass.

    Args:
        backward: computes the input's gradient from the output's gradient and ``kept``.
        kept: the tensors that ``backward`` reads. Do not put them in a closure of ``backward``. Tensors in a closure
            stay in memory after the backward pass, and recomputation does not free them.
    """
    return _Differentiable.apply(x, forward, backward, *kept)
