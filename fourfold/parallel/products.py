"""The three matrix products of a linear layer, in the type of their operands."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Products:
    """Products in the type of the operands; ``float8`` has a subclass that rounds them first."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def input_gradient(self, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Σ grad @ weight over layers that read one input, accumulated inside the products."""
        total = grads[0] @ weights[0]
        flat = total.flatten(0, -2)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            flat.addmm_(grad.flatten(0, -2), weight)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).T @ x.flatten(0, -2)
