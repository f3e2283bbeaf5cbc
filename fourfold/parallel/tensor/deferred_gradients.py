"""Compute weight gradients later than input gradients, when the rank would otherwise wait. Zero-bubble pipeline
schedules do this.

We cannot use ``torch.autograd.grad`` here. It would need one call for the input gradients and another for the weight
gradients. Each layer's backward pass would then run twice, including its collectives.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fourfold.parallel.tensor.linear import Linear4D


class WeightGradients:
    """The operands of weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self.operands: list[tuple[Linear4D, Tensor, Tensor]] = []

    @torch.no_grad()
    def compute(self, receive: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Compute each gradient, and call ``receive(parameter, gradient)``."""
        for linear, grad, x in self.operands:
            gradient = linear.matmuls.weight_gradient(grad, x)
            receive(linear.weight, linear.tiles["weight"].as_tile(gradient))
        self.operands.clear()


@contextmanager
def weight_gradients_deferred(linears: Iterable[Linear4D]) -> Iterator[WeightGradients]:
    """Make backward passes in this ``with`` block skip the weight gradients of these layers.

    LoRA adapters still get their gradients.

    Yields:
        An object that computes the skipped gradients later.
    """
    deferred = WeightGradients()
    for linear in linears:
        linear.deferred = deferred.operands
    try:
        yield deferred
    finally:
        for linear in linears:
            linear.deferred = None
