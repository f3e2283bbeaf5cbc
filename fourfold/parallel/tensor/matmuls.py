"""Compute the matmuls of a linear layer and of its LoRA adapter.

An adapter adds s · (x Aᵀ) Bᵀ to the output, with s = α/r, A [r, in] and B [out, r]. It is added before x Wᵀ is summed
over the ranks, so an adapter needs no extra collective. A is tiled like the weight's columns, and B like the weight's
rows. Each rank computes only a part of each gradient. The gradient of A is summed over the axis that splits the rows,
and the gradient of B over the axis that splits the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fourfold.parallel.tensor.sharding import Tile


class Matmuls:
    """The three matmuls of a layer, in the dtype of their operands. ``Float8Matmuls`` rounds the operands first."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """Return grad @ weight.

        If ``total`` is given, add the result to it. ``total`` is the sum over earlier layers that read the same input.
        """
        if total is None:
            return grad @ weight
        total.view(-1, total.shape[-1]).addmm_(grad.flatten(0, -2), weight)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).T @ x.flatten(0, -2)


def adapter_tiles(weight: Tile) -> tuple[Tile, Tile]:
    """Return the tiles of A and B that belong to a weight's tile."""
    if weight.y == 1:
        # If x does not split the rows, each rank of x computes the gradient of all rows of B from its own tokens. So
        # this gradient is also summed over x.
        over_b = ("y",) if weight.x == 0 else ("x", "y")
        return Tile(y=1, partial_over=("x",)), Tile(x=weight.x, partial_over=over_b)
    return Tile(x=1, partial_over=("y",)), Tile(y=0, partial_over=("x",))


def add_to_output(out: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """Add s · (x Aᵀ) Bᵀ to the output, in place."""
    a, b = adapter
    out.view(-1, out.shape[-1]).addmm_((x @ a.T).flatten(0, 1), b.T, alpha=scale)


def add_to_input_gradient(total: Tensor, grad: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """Add s · (dout B) A to the input gradient, in place."""
    a, b = adapter
    total.view(-1, total.shape[-1]).addmm_((grad @ b).flatten(0, 1), a, alpha=scale)


def adapter_gradients(grad: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Return dA = (dout (s B))ᵀ x and dB = doutᵀ (x (s A)ᵀ).

    While B is small, dout B may underflow in fp16. So B is multiplied by s first, as in autograd's gradient of s · (x
    Aᵀ) Bᵀ.
    """
    (a, b), exact = adapter, Matmuls()
    return exact.weight_gradient(grad @ (scale * b), x), exact.weight_gradient(grad, x @ (scale * a).T)
