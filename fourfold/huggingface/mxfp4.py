"""Read matrices that files store in MXFP4: 4-bit numbers in blocks of 32, each block with one power of two as its
scale.

The format is the OCP Microscaling Formats specification, version 1.0. GPT-OSS's files store each expert's matrices as
[out, in].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.models.tensor_files import TensorFiles

BLOCK = 32
"""Number of values that share a scale."""

HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*HALF, *(-value for value in HALF))
"""The value of each 4-bit number (E2M1)."""

SCALE_OF_ONE = 127
"""The stored scale that stands for the factor 1. A stored scale s stands for the factor 2^(s − SCALE_OF_ONE)."""


@dataclass(frozen=True)
class PackedMatrices:
    """The matrices of a layer's experts, in two tensors of bytes."""

    files: TensorFiles
    names: tuple[str, str]
    """The names of the tensor of blocks [E, out, in/32, 16] and of the tensor of scales [E, out, in/32]."""

    def read_into(self, out_OI: Tensor, expert: int | None, rows: slice, columns: slice) -> None:
        """Copy part of one expert's matrix to ``out_OI``.

        Args:
            out_OI: The tensor to fill.
            expert: Index of the expert.
            rows: Rows of the matrix [out, in] to copy.
            columns: Columns of the matrix to copy.

        Raises:
            UserError: A value is too large for the dtype of ``out_OI``.
        """
        assert expert is not None
        whole_blocks = slice(columns.start // BLOCK, math.ceil(columns.stop / BLOCK))
        part = (slice(expert, expert + 1), rows, whole_blocks)
        blocks, scales = (self.files.read_bytes(name, part)[0] for name in self.names)
        first = columns.start - whole_blocks.start * BLOCK
        out_OI.copy_(unpacked(blocks, scales)[:, first : first + columns.stop - columns.start])
        self.files.check_finite(self.names[1], out_OI, "scales that make values infinite")


def packed_in(files: TensorFiles, names: Sequence[str], shape: tuple[int, ...]) -> PackedMatrices | None:
    """Return the matrices [E, in, out] that files store in MXFP4 under one of these names, or None if there are none.

    Args:
        files: The files.
        names: Names that the matrices may have, without the suffixes ``_blocks`` and ``_scales``.
        shape: Shape that the matrices must have [E, in, out].

    Raises:
        UserError: A tensor is missing, has another shape, or does not hold bytes, or rows do not divide into blocks.
    """
    kinds = "_blocks", "_scales"
    name = next((name for name in names if any(name + kind in files.shapes for kind in kinds)), None)
    if name is None:
        return None
    experts, inputs, outputs = shape
    if inputs % BLOCK:
        raise UserError(f"{name} in MXFP4 has rows of {inputs} numbers, which do not divide into blocks of {BLOCK}")
    scales = (experts, outputs, inputs // BLOCK)
    shapes = (*scales, BLOCK // 2), scales
    blocks, scale = (files.find([name + kind], each) for kind, each in zip(kinds, shapes, strict=True))
    files.check_bytes(blocks, "U8")
    files.check_bytes(scale, "U8", "F8_E8M0")
    return PackedMatrices(files, (blocks, scale))


def unpacked(blocks_OGb: Tensor, scales_OG: Tensor) -> Tensor:
    """Return the float32 matrix [out, in] that is stored as blocks [out, in/32, 16] and scales [out, in/32] of bytes.

    A byte of a block holds two numbers. The first number is in the lower four bits.
    """
    values = torch.tensor(VALUES, device=blocks_OGb.device)
    pairs_OGb2 = torch.stack([values[(blocks_OGb & 15).int()], values[(blocks_OGb >> 4).int()]], dim=-1)
    exponents_OG = scales_OG.int() - SCALE_OF_ONE
    return torch.ldexp(pairs_OGb2.flatten(-2), exponents_OG[..., None]).flatten(-2)
