"""Grouped matmuls. A stack has one matrix per group. Each group of consecutive rows is multiplied by its own matrix.

Shapes: N rows, E groups, I inputs, O outputs.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.autograd import Context, Function, differentiable

ALIGNMENT = 16
"""torch's grouped kernel needs rows whose size is a multiple of this many bytes."""


class HostNumbers:
    """Copies integers from a device to the host in the background. Only ``read`` waits for the copy.

    ``on_device`` is the tensor with the same integers on the device.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.on_device, self._copy, self._event = on_device, on_device, None
        if on_device.is_cuda:
            self._copy = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            self._copy.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def have_arrived(self) -> bool:
        """Return whether the copy is complete, so that ``read`` does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """Return the integers as nested lists."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy.tolist()


class Groups:
    """Divides rows into consecutive groups of given sizes.

    For rows after the last group, the results of matmuls are undefined. torch's grouped kernel reads the sizes on the
    device. Without this kernel, each group is a separate matmul, and the host waits for the sizes.

    Args:
        sizes_E: the number of rows in each group, on the device.
        sizes: the same numbers, if the host knows them.
    """

    def __init__(self, sizes_E: Tensor, sizes: Sequence[int] | None = None) -> None:
        self._numbers = HostNumbers(sizes_E) if sizes is None else None
        self._sizes_E, self._sizes = sizes_E, sizes

    @cached_property
    def ends_E(self) -> Tensor:
        """Return the index of the first row after each group, int32 on the device."""
        return self._sizes_E.cumsum(0, dtype=torch.int32)

    def of_rows(self, count: int) -> Tensor:
        """Return the index of each row's group, [count]. Rows after the last group get the last group's index."""
        places_N = torch.arange(count, device=self.ends_E.device, dtype=torch.int32)
        return torch.searchsorted(self.ends_E, places_N, right=True).clamp_(max=len(self.ends_E) - 1)

    @cached_property
    def sizes(self) -> list[int]:
        """Return the number of rows in each group, on the host."""
        if self._numbers is not None:
            return self._numbers.read()
        assert self._sizes is not None
        return list(self._sizes)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each group as separate tensors."""
        parts: tuple[Tensor, ...] = rows[: sum(self.sizes)].split(self.sizes)
        return parts

    def zero_empty(self, out_EOI: Tensor) -> None:
        """Set the matrices of empty groups to zero, without waiting until the host knows the sizes."""
        if self._numbers is not None and not self._numbers.have_arrived():
            out_EOI.masked_fill_((self._sizes_E == 0)[:, None, None], 0)
            return
        for out_OI, count in zip(out_EOI, self.sizes, strict=True):
            if not count:
                out_OI.zero_()


def grouped_matmul(rows_NI: Tensor, weights_EOI: Tensor, groups: Groups) -> Tensor:
    """Multiply each group of rows x by its matrix W, and return x Wᵀ for all rows, [N, O]. Groups may be empty.

    The first of two autograd functions saves the operands, and the second multiplies. If the backward pass does not
    need the product, activation checkpointing can stop after the first function and need not repeat the matmul.
    """
    kept_NO = _KeepOperands.apply(rows_NI, weights_EOI, groups)
    return _GroupedMatmul.apply(kept_NO, rows_NI.detach(), weights_EOI.detach(), groups)


def add_biases(rows_NO: Tensor, biases_EO: Tensor | None, groups: Groups) -> Tensor:
    """Add the bias of each row's group to the row. Return the rows unchanged if there are no biases."""
    if biases_EO is None:
        return rows_NO
    group_N = groups.of_rows(len(rows_NO))

    def sum_of_groups(grad_NO: Tensor) -> Tensor:
        # Sum with a matmul by ones, because a matmul adds in float32 and always in the same order.
        return _outer(grad_NO, grad_NO.new_ones(len(grad_NO), ALIGNMENT), groups)[..., 0]

    return rows_NO + differentiable(biases_EO, lambda biases: biases[group_N], sum_of_groups)


class _KeepOperands(Function):
    """Saves the operands, and computes their gradients in the backward pass.

    The output has no data. Its only use is to receive the gradient of the matmul's output.
    """

    @staticmethod
    def forward(ctx: Context[Groups], rows_NI: Tensor, weights_EOI: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows_NI, weights_EOI)
        ctx.kept = groups
        return rows_NI.new_empty(()).expand(len(rows_NI), weights_EOI.shape[1])

    @staticmethod
    def backward(ctx: Context[Groups], grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows_NI, weights_EOI), groups = ctx.saved_tensors, ctx.kept
        d_rows = _multiply(grad_NO, weights_EOI.mT, groups) if ctx.needs_input_grad[0] else None
        d_weights = _outer(grad_NO, rows_NI, groups, weights_EOI) if ctx.needs_input_grad[1] else None
        return d_rows, d_weights, None


class _GroupedMatmul(Function):
    """Computes the matmul. The backward pass hands the output's gradient to ``_KeepOperands`` unchanged."""

    @staticmethod
    def forward(ctx: object, kept_NO: Tensor, rows_NI: Tensor, weights_EOI: Tensor, groups: Groups) -> Tensor:
        return _multiply(rows_NI, weights_EOI, groups)

    @staticmethod
    def backward(ctx: object, grad_NO: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_NO, None, None, None


def _multiply(rows_NI: Tensor, weights_EOI: Tensor, groups: Groups) -> Tensor:
    """Return x Wᵀ for all rows x, where W is the matrix of the row's group, [N, O]."""
    if has_kernel(rows_NI, weights_EOI, *weights_EOI.shape[1:]):
        return F.grouped_mm(rows_NI.contiguous(), weights_EOI.mT, offs=groups.ends_E)
    out_NO = rows_NI.new_empty(len(rows_NI), weights_EOI.shape[1])
    for rows, weight_OI, out in zip(groups.split(rows_NI), weights_EOI, groups.split(out_NO), strict=True):
        if len(rows):
            torch.mm(rows, weight_OI.T, out=out)
    return out_NO


def _outer(grad_NO: Tensor, rows_NI: Tensor, groups: Groups, weights_EOI: Tensor | None = None) -> Tensor:
    """Return the weight gradient gradᵀ x of each group, [E, O, I]. The gradient of an empty group is zero.

    If torch's kernel runs, the result is contiguous. Otherwise, the result has the strides of ``weights_EOI``, if it is
    given, so autograd need not copy the result.
    """
    if has_kernel(grad_NO, rows_NI, grad_NO.shape[1], rows_NI.shape[1]):
        out_EOI = F.grouped_mm(grad_NO.contiguous().T, rows_NI.contiguous(), offs=groups.ends_E)
        # Some kernels leave the matrices of empty groups unwritten (pytorch issue 172439).
        groups.zero_empty(out_EOI)
        return out_EOI
    shape = len(groups.sizes), grad_NO.shape[1], rows_NI.shape[1]
    out_EOI = rows_NI.new_empty(shape) if weights_EOI is None else torch.empty_like(weights_EOI, dtype=rows_NI.dtype)
    for grad, rows, out_OI in zip(groups.split(grad_NO), groups.split(rows_NI), out_EOI, strict=True):
        torch.mm(grad.T, rows, out=out_OI)  # An empty group gets zeros.
    return out_EOI


def has_kernel(rows: Tensor, other: Tensor, *widths: int) -> bool:
    """Return whether torch's kernel can multiply all groups at once. The kernel needs a GPU, bf16, and rows whose size
    in bytes is a multiple of ``ALIGNMENT``."""
    fits = all(width * rows.element_size() % ALIGNMENT == 0 for width in widths)
    is_half = rows.dtype == other.dtype == torch.bfloat16
    return hasattr(F, "grouped_mm") and rows.is_cuda and is_half and fits and len(rows) > 0
