"""Memory layouts for the three matmuls of a linear layer. A layout says how the weight is stored, and which operands
are copied before a matmul.

BLAS libraries have one kernel for each pair of operand layouts (N: as stored, T: transposed). For some sizes, one of
these kernels is much slower (AxoNN, arXiv 2502.08145, section VI.C). A different layout can avoid this kernel.

By default, the output x Wᵀ is NT, the input gradient dY W is NN, and the weight gradient dYᵀ x is TN. If the weight is
stored as its transpose, the three matmuls are NN, NT, and TN. This costs no time in a step. Any other layout costs a
copy of an operand in every step.
"""

from typing import Literal

from torch import Tensor

from fourfold.config.strict import Strict
from fourfold.models.transformer import Transformer
from fourfold.parallel.tensor.linear import Linear4D
from fourfold.parallel.tensor.matmuls import Matmuls

PADDED_TO = 128
"""Size in bytes of one cache line of a GPU, or of two cache lines of a CPU. The length of a padded row is an odd
multiple of this size. This spreads the entries of a column over all cache sets and memory channels."""

Copy = Literal["none", "turned", "padded", "turned and padded"]
"""How to copy an operand: not at all, into transposed memory order, into padded rows (or columns), or both."""


class Copies(Strict, frozen=True):
    """Which operands one matmul copies, and how."""

    left: Copy = "none"
    right: Copy = "none"

    def operands(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return copied(left, self.left), copied(right, self.right)

    def describe(self) -> str:
        """Describe the copies, or return "" if there are none."""
        return ", ".join(
            f"{side} {copy}" for side, copy in (("left", self.left), ("right", self.right)) if copy != "none"
        )


class LayerLayout(Strict, frozen=True):
    """The layouts of the three matmuls of one layer."""

    turned: bool = False
    """Whether the weight is stored as its transpose."""
    output: Copies = Copies()
    input_gradient: Copies = Copies()
    weight_gradient: Copies = Copies()


Layouts = dict[tuple[int, int], LayerLayout]
"""Maps the shape [out, in] of a rank's weight tile to the layout of the layer's matmuls. Layers with any other shape
use the default layout."""


class LaidOutMatmuls(Matmuls):
    """Copies operands as ``layout`` says, and then computes the three matmuls of a layer."""

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
        # If the weight is stored as its transpose, compute (xᵀ dY)ᵀ. The gradient then has the memory layout of the
        # weight.
        return (right.T @ left.T).T if self.layout.turned else left @ right


def copied(matrix: Tensor, how: Copy) -> Tensor:
    """Return the matrix, or a copy of it in another memory layout."""
    if how == "none":
        return matrix
    by_columns = matrix.stride(1) != 1
    if how in ("turned", "turned and padded"):
        by_columns = not by_columns
    rows = matrix.T if by_columns else matrix
    width = rows.shape[1] if how == "turned" else padded_width(rows.shape[1], rows.element_size())
    padded = rows.new_empty(rows.shape[0], width)
    # Write zeros to the padding. Some kernels multiply it by zero (oneDNN on AMX, in bf16), and NaN times zero is NaN.
    padded[:, rows.shape[1] :].zero_()
    copy = padded[:, : rows.shape[1]].copy_(rows)
    return copy.T if by_columns else copy


def padded_width(width: int, itemsize: int) -> int:
    """Return how many entries a padded row has. The row's size is the smallest odd multiple of ``PADDED_TO`` bytes that
    fits ``width`` entries."""
    each = PADDED_TO // itemsize
    return (-(-width // each) | 1) * each


def lay_out_matmuls(model: Transformer, layouts: Layouts) -> None:
    """Set the layout of each linear layer whose weight tile has a shape in ``layouts``. The model must be on the meta
    device."""
    for module in model.modules():
        if isinstance(module, Linear4D):
            layout = layouts.get((module.weight.shape[0], module.weight.shape[1]))
            if layout is not None:
                module.matmuls = LaidOutMatmuls(layout)
                if layout.turned:
                    module.turn()
