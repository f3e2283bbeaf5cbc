"""Read matrices that files store in 8 bits, with one float32 factor for each block of 128 rows and 128 columns.

DeepSeek-V3's files store the model's linear layers like this (arXiv 2412.19437, section 3.3.2). The tensor of factors
is named ``weight_scale_inv``, although the values are multiplied by the factors, not divided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.models.tensor_files import TensorFiles

BLOCK = 128
"""Number of rows and of columns that share a factor. The last blocks may be smaller."""

SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in FP8 (E4M3), and the factors of its blocks."""

    files: TensorFiles
    names: tuple[str, str]
    """The name of the matrix, and then the name of the tensor of its factors."""

    def read_into(self, out_OI: Tensor, expert: int | None, rows: slice, columns: slice) -> None:
        """Copy part of the matrix to ``out_OI``.

        Args:
            out_OI: The tensor to fill.
            expert: Always None, because each expert has its own matrix.
            rows: Rows of the matrix to copy.
            columns: Columns of the matrix to copy.

        Raises:
            UserError: A value is NaN or infinite in the dtype of ``out_OI``.
        """
        assert expert is None
        name, factors = self.names
        of_factors = tuple(slice(0, size) for size in self.files.shapes[factors])
        whole = torch.empty(self.files.shapes[factors])
        self.files.read_into(whole, factors, of_factors)
        row_blocks, column_blocks = (
            torch.arange(each.start, each.stop, each.step or 1) // BLOCK for each in (rows, columns)
        )
        values = self.files.read_bytes(name, (rows, columns)).view(torch.float8_e4m3fn).float()
        # Round to bf16 first. Then the weights are the same for every dtype of ``out_OI``.
        out_OI.copy_((values * whole[row_blocks][:, column_blocks]).bfloat16())
        self.files.check_finite(name, out_OI)


def scaled_in(files: TensorFiles, names: Sequence[str], shape: tuple[int, ...]) -> ScaledMatrix | None:
    """Return the matrix that files store in FP8 under one of these names, or None if there is no such matrix.

    Args:
        files: The files.
        names: Names that the matrix may have.
        shape: Shape that the matrix must have [out, in].

    Raises:
        UserError: A tensor is missing, or has another shape or dtype.
    """
    name = next((name for name in names if name + SUFFIX in files.shapes), None)
    if name is None:
        return None
    factors = files.find([name + SUFFIX], tuple(math.ceil(size / BLOCK) for size in shape))
    files.check_bytes(files.find([name], shape), "F8_E4M3")
    return ScaledMatrix(files, (name, factors))
