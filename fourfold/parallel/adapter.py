"""LoRA on a tiled linear layer: out += s · (x Aᵀ) Bᵀ, with s = α/r, A [r, in] and B [out, r].

The addition is summed over the ranks where x Wᵀ is, so that an adapter needs no collective of its own. A is tiled as
the weight's columns and B as its rows; the gradient of each is this rank's share of a sum over the other axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fourfold.parallel.products import Products
from fourfold.parallel.sharding import Tile

PRODUCTS = Products()


def adapter_tiles(weight: Tile) -> tuple[Tile, Tile]:
    """The tiles of A and B beside a weight's."""
    if weight.x == 0:
        return Tile(y=1, partial_over=("x",)), Tile(x=0, partial_over=("y",))
    return Tile(x=1, partial_over=("y",)), Tile(y=0, partial_over=("x",))


def add_to_output(out: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """out += s · (x Aᵀ) Bᵀ."""
    a, b = adapter
    out.view(-1, out.shape[-1]).addmm_((x @ a.T).flatten(0, 1), b.T, alpha=scale)


def add_to_input_gradient(total: Tensor, grad: Tensor, adapter: Sequence[Tensor], scale: float) -> None:
    """dx += s · (dout B) A."""
    a, b = adapter
    total.view(-1, total.shape[-1]).addmm_((grad @ b).flatten(0, 1), a, alpha=scale)


def adapter_gradients(grad: Tensor, x: Tensor, adapter: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """dA = s · (dout B)ᵀ x and dB = s · doutᵀ (x Aᵀ)."""
    a, b = adapter
    return PRODUCTS.weight_gradient(grad @ b, x).mul_(scale), PRODUCTS.weight_gradient(grad, x @ a.T).mul_(scale)
