"""Layouts of the three products of a linear layer: how the weight is stored, and which operands are copied first.

Libraries have a kernel for each pair of layouts in which two operands lie in memory (N: as stored, T: transposed), and
some are much slower than others for some sizes (AxoNN, arXiv 2502.08145, section VI.C). With rows of features, outputs
x Wᵀ are NT, input gradients dY W are NN, and weight gradients dYᵀ x are TN. A weight stored as its transpose makes
outputs NN and input gradients NT, at no cost per call. Every other layout costs a copy of an operand.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fourfold.config.strict import Strict
from fourfold.models.transformer import Transformer
from fourfold.parallel.tensor.linear import Linear4D
from fourfold.parallel.tensor.matmuls import Matmuls

PADDED_TO = 128
"""Bytes of a cache line on GPUs, twice that of a CPU: padded rows are an odd number of them apart, so that the entries
of a column are spread over all sets of a cache and all channels of a memory."""

Copy = Literal["none", "turned", "padded", "turned and padded"]
"""An operand as it is; copied into the other order, so that its columns are contiguous where its rows were; copied into
rows (or columns) that begin a padded distance apart; or both."""


class Way(Strict, frozen=True):
    """The copies that one product makes of its operands."""

    left: Copy = "none"
    right: Copy = "none"

    def operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return copied(left, self.left), copied(right, self.right)

    def describe(self) -> str:
        """The copies in words; nothing without any."""
        return ", ".join(
            f"{side} {copy}" for side, copy in (("left", self.left), ("right", self.right)) if copy != "none"
        )


class LayerLayout(Strict, frozen=True):
    """The layouts of one layer's products: x Wᵀ, dY W and dYᵀ x, whose operands are left and right."""

    turned: bool = False
    """The weight is stored as its transpose."""
    output: Way = Way()
    input_gradient: Way = Way()
    weight_gradient: Way = Way()


Layouts = dict[tuple[int, int], LayerLayout]
"""By the shape [out, in] of a rank's tile of the weight; other layers are as without."""


class LaidOutMatmuls(Matmuls):
    """The three products in a layer's own layouts."""

    def __init__(self, layout: LayerLayout) -> None:
        self.layout = layout

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        left, right = self.layout.output.operands(x.flatten(0, -2), weight.T)
        out: Tensor = (left @ right).unflatten(0, x.shape[:-1])
        return out

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        left, right = self.layout.input_gradient.operands(grad.flatten(0, -2), weight)
        if total is None:
            gradient: Tensor = (left @ right).unflatten(0, grad.shape[:-1])
            return gradient
        total.view(-1, total.shape[-1]).addmm_(left, right)
        return total

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        left, right = self.layout.weight_gradient.operands(grad.flatten(0, -2).T, x.flatten(0, -2))
        # Of a turned weight (xᵀ dY)ᵀ, which has the memory order of the stored weight.
        return (right.T @ left.T).T if self.layout.turned else left @ right


def copied(matrix: Tensor, how: Copy) -> Tensor:
    """The same matrix, in another place of memory unless ``how`` is "none"."""
    if how == "none":
        return matrix
    by_columns = matrix.stride(1) != 1
    if how in ("turned", "turned and padded"):
        by_columns = not by_columns
    rows = matrix.T if by_columns else matrix
    width = rows.shape[1] if how == "turned" else padded_width(rows.shape[1], rows.element_size())
    copy = rows.new_empty(rows.shape[0], width)[:, : rows.shape[1]].copy_(rows)
    return copy.T if by_columns else copy


def padded_width(width: int, itemsize: int) -> int:
    """The least odd number of ``PADDED_TO`` bytes that holds ``width`` entries, in entries."""
    each = PADDED_TO // itemsize
    return (-(-width // each) | 1) * each


def lay_out_matmuls(model: Transformer, layouts: Layouts) -> None:
    """Give the linear layers of the blocks, on the meta device, the layouts of their sizes."""
    for module in model.modules():
        if isinstance(module, Linear4D):
            layout = layouts.get((module.weight.shape[0], module.weight.shape[1]))
            if layout is not None:
                module.matmuls = LaidOutMatmuls(layout)
                if layout.turned:
                    module.turn()
