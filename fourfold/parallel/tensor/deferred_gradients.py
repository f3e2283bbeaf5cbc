"""Defer weight gradients until the rank would otherwise wait. Zero-bubble schedules require this.

``torch.autograd.grad`` cannot do this. After the input gradients, it would run each layer's backward and its
collectives a second time for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fourfold.parallel.tensor.linear import Linear4D


class WeightGradients:
    """The weight gradients that one backward pass has deferred."""

    def __init__(self) -> None:
        self.operands: list[tuple[Linear4D, Tensor, Tensor]] = []

    @torch.no_grad()
    def compute(self, receive: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Compute each gradient, and pass it to ``receive`` with its parameter."""
        for linear, grad, x in self.operands:
            gradient = linear.matmuls.weight_gradient(grad, x)
            receive(linear.weight, linear.tiles["weight"].as_tile(gradient))
        self.operands.clear()


@contextmanager
def weight_gradients_deferred(linears: Iterable[Linear4D]) -> Iterator[WeightGradients]:
    """Leave these layers' weight gradients out of the backward passes in this block.

    Yield an object that computes them later.
    """
    deferred = WeightGradients()
    for linear in linears:
        linear.deferred = deferred.operands
    try:
        yield deferred
    finally:
        for linear in linears:
            linear.deferred = None
