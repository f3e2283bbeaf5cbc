"""Define base classes for autograd functions. Unlike torch's own classes, these classes have type annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Function(torch.autograd.Function):
    """Base class of differentiable functions with one output."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Tensor: ...


class FunctionOfMany(torch.autograd.Function):
    """Base class of differentiable functions with several outputs."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> tuple[Tensor, ...]: ...


class Context(Protocol[T]):
    """The type of ``ctx`` in autograd functions. It carries saved tensors, and one other value in ``kept``, from the
    forward to the backward pass."""

    kept: T
    saved_tensors: tuple[Any, ...]
    """The arguments of ``save_for_backward``, which may include None."""

    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from ``torch.compile``, which cannot trace asynchronous collectives."""
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
        # Read saved tensors only once, because recomputed tensors can be read only once.
        kept = ctx.saved_tensors
        return ctx.kept(grad, *kept), None, None, *(None for _ in kept)


def differentiable(
    x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[..., Tensor], *kept: Tensor | None
) -> Tensor:
    """Return ``forward(x)``, and use ``backward`` to compute the gradient of ``x``.

    Args:
        backward: computes the gradient of ``x`` from the gradient of the output and ``kept``.
        kept: all tensors that ``backward`` reads. If ``backward`` were a closure over these tensors, they would stay in
            memory after the backward pass, and recomputation could not free them.
    """
    return _Differentiable.apply(x, forward, backward, *kept)
