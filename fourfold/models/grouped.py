"""Products of consecutive rows with one matrix of a stack for each group of rows.

Shapes: N rows, E groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.autograd import Context, Function

ALIGNMENT = 16
"""Bytes that every row of the operands of torch's grouped kernel is a multiple of."""


def grouped_product(rows_NI: Tensor, weights_EOI: Tensor, sizes: Sequence[int]) -> Tensor:
    """Multiply each group of rows by its matrix, x Wᵀ, [N, O]; groups may be empty.

    sizes: the rows of each group, which follow one another.

    The product is a function of its own beside the one that keeps the operands: when it is recomputed, and nothing
    reads it, the recomputation stops before it.
    """
    assert sum(sizes) == len(rows_NI) and len(sizes) == len(weights_EOI), (sizes, rows_NI.shape, weights_EOI.shape)
    kept_NO = _Keep.apply(rows_NI, weights_EOI, sizes)
    return _Multiply.apply(kept_NO, rows_NI.detach(), weights_EOI.detach(), sizes)


class _Keep(Function):
    """Keeps the operands, and computes their gradients; its output is only the place for the product's gradient."""

    @staticmethod
    def forward(ctx: Context[Sequence[int]], rows_NI: Tensor, weights_EOI: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(rows_NI, weights_EOI)
        ctx.kept = sizes
        return rows_NI.new_empty(()).expand(len(rows_NI), weights_EOI.shape[1])

    @staticmethod
    def backward(ctx: Context[Sequence[int]], grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows_NI, weights_EOI), sizes = ctx.saved_tensors, ctx.kept
        d_rows = _multiply(grad_NO, weights_EOI.mT, sizes) if ctx.needs_input_grad[0] else None
        d_weights = _outer(grad_NO, rows_NI, sizes) if ctx.needs_input_grad[1] else None
        return d_rows, d_weights, None


class _Multiply(Function):
    """The product; its gradient passes through to ``_Keep``."""

    @staticmethod
    def forward(ctx: object, kept_NO: Tensor, rows_NI: Tensor, weights_EOI: Tensor, sizes: Sequence[int]) -> Tensor:
        return _multiply(rows_NI, weights_EOI, sizes)

    @staticmethod
    def backward(ctx: object, grad_NO: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_NO, None, None, None


def _multiply(rows_NI: Tensor, weights_EOI: Tensor, sizes: Sequence[int]) -> Tensor:
    """x Wᵀ of each group."""
    if has_kernel(rows_NI, weights_EOI, *weights_EOI.shape[1:]):
        return F.grouped_mm(rows_NI.contiguous(), weights_EOI.mT, offs=_ends(sizes, rows_NI.device))
    out_NO = rows_NI.new_empty(len(rows_NI), weights_EOI.shape[1])
    for rows, weight_OI, out in zip(rows_NI.split(sizes), weights_EOI, out_NO.split(sizes), strict=True):
        if len(rows):
            torch.mm(rows, weight_OI.T, out=out)
    return out_NO


def _outer(grad_NO: Tensor, rows_NI: Tensor, sizes: Sequence[int]) -> Tensor:
    """gradᵀ x of each group, [E, O, I]; zero for an empty one."""
    if has_kernel(grad_NO, rows_NI, grad_NO.shape[1], rows_NI.shape[1]):
        out_EOI = F.grouped_mm(grad_NO.contiguous().T, rows_NI.contiguous(), offs=_ends(sizes, rows_NI.device))
        for out_OI, count in zip(out_EOI, sizes, strict=True):
            if not count:
                out_OI.zero_()  # some kernels leave it as it was (pytorch issue 172439)
        return out_EOI
    out_EOI = rows_NI.new_empty(len(sizes), grad_NO.shape[1], rows_NI.shape[1])
    for grad, rows, out_OI in zip(grad_NO.split(sizes), rows_NI.split(sizes), out_EOI, strict=True):
        torch.mm(grad.T, rows, out=out_OI)  # of no rows: zero
    return out_EOI


def has_kernel(rows: Tensor, other: Tensor, *widths: int) -> bool:
    """True where torch multiplies all groups in one kernel: bf16 on a GPU, with widths that are whole lines of it."""
    fits = all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)
    is_half = rows.dtype == other.dtype == torch.bfloat16
    return hasattr(F, "grouped_mm") and rows.is_cuda and is_half and fits and len(rows) > 0


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
