"""Compute the matmuls of a linear layer and of its LoRA adapter.

An adapter adds s · (x Aᵀ) Bᵀ to the output, with s = α/r, A [r, in], and B [out, r]. Each rank adds its part of this
product to its part of x Wᵀ, before the collective that sums the outputs. So an adapter needs no collective of its own.

A is split like the columns of the weight, and B like the rows of the weight. Each rank computes only a part of the
gradients of A and B. The gradient of A is summed over the axis that splits the rows of the weight. The gradient of B is
summed over the axis that splits the columns.
"""

from collections.abc import Sequence

from torch import Tensor

from fourfold.parallel.tensor.sharding import Tile


class Matmuls:
    """Computes the three matmuls of a layer in the dtype of the operands. Subclasses use float8 or other layouts."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """Return grad @ weight.

        Args:
            total: the input gradient, summed over earlier layers that read the same input. If given, add this layer's
                result in place.
        """
        if total is None:
            return grad @ weight
        total.view(-1, total.shape[-1]).addmm_(grad.flatten(0, -2), weight)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).T @ x.flatten(0, -2)


def adapter_tiles(weight: Tile) -> tuple[Tile, Tile]:
    """Return the tiles of the LoRA matrices A and B, given the tile of the weight."""
    if weight.y == 1:
        # If x does not split the weight's rows, every x rank holds all of B. Each of them computes B's gradient from
        # its own tokens, so sum the gradient over x too.
        over_b = ("y",) if weight.x == 0 else ("x", "y")
        return Tile(y=1, partial_over=("x",)), Tile(x=weight.x, partial_over=over_b)
    return Tile(x=1, partial_over=("y",)), Tile(y=0, partial_over=("x",))


def add_to_output(out: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """Add the LoRA adapter's output s · (x Aᵀ) Bᵀ to ``out``, in place. s is ``scale``."""
    a, b = adapter
    out.view(-1, out.shape[-1]).addmm_((x @ a.T).flatten(0, 1), b.T, alpha=scale)


def add_to_input_gradient(total: Tensor, grad: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """Add the LoRA adapter's input gradient s · (dout B) A to ``total``, in place.

    s is ``scale``, and dout is the output gradient ``grad``.
    """
    a, b = adapter
    total.view(-1, total.shape[-1]).addmm_((grad @ b).flatten(0, 1), a, alpha=scale)


def adapter_gradients(grad: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of the LoRA matrices A and B: dA = (dout (s B))ᵀ x and dB = doutᵀ (x (s A)ᵀ).

    dout is the output gradient ``grad``. B is multiplied by s first, because B is small at the start of training.
    Without the factor, dout B could underflow in fp16.
    """
    (a, b), exact = adapter, Matmuls()
    return exact.weight_gradient(grad @ (scale * b), x), exact.weight_gradient(grad, x @ (scale * a).T)
