"""Weight gradients that zero-bubble schedules compute after the rest of the backward, while a rank would wait.

Asking autograd for the input gradients alone would run a layer's backward, with its collectives, a second time for the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fourfold.parallel.tensor.linear import Linear4D


class WeightGradients:
    """The operands of the weight gradients of one backward."""

    def __init__(self) -> None:
        self._operands: list[tuple[Linear4D, Tensor, Tensor]] = []

    def add(self, linear: Linear4D, grad: Tensor, x: Tensor) -> None:
        self._operands.append((linear, grad, x))

    @torch.no_grad()
    def compute(self, receive: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Compute each gradient, and pass it to ``receive`` with its parameter."""
        for linear, grad, x in self._operands:
            gradient = linear.products.weight_gradient(grad, x)
            receive(linear.weight, linear.tiles["weight"].as_tile(gradient))
        self._operands.clear()


@contextmanager
def weight_gradients_deferred(linears: Iterable[Linear4D]) -> Iterator[WeightGradients]:
    """Leave the weight gradients of these layers out of the backwards in this block; yield what computes them later."""
    deferred = WeightGradients()
    for linear in linears:
        linear.deferred = deferred
    try:
        yield deferred
    finally:
        for linear in linears:
            linear.deferred = None
