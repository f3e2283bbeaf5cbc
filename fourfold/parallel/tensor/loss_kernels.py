"""Compute the cross-entropy of a chunk of logits with two Triton kernels, in the dtype of the logits.

The first kernel reads the logits. The second kernel reads them again and overwrites them with their gradient. Separate
PyTorch operations would read or write float32 copies of the logits about twelve times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""The largest number of logits of one row that one iteration of the first kernel handles. One program of the second
kernel also handles at most this number."""

NEVER = tl.constexpr(float("-inf"))


def normalize(logits_mv: Tensor, labels_m: Tensor, first: int, real: int, softcap: float) -> Tensor:
    """Run the first kernel. It implements ``fused_loss.normalize_logits``."""
    assert logits_mv.stride(1) == 1, "rows must be contiguous"
    rows, columns = logits_mv.shape
    both_2m = torch.empty(2, rows, dtype=torch.float32, device=logits_mv.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits_mv):
        _normalize[rows,](
            logits_mv, labels_m.contiguous(), both_2m, logits_mv.stride(0), rows, columns, first, real, softcap,
            CAPPED=softcap > 0, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return both_2m


def differentiate(
    logits_mv: Tensor, labels_m: Tensor, normalizer_m: Tensor, factor_m: Tensor, first: int, real: int, softcap: float
) -> None:
    """Run the second kernel. It implements ``fused_loss.differentiate_logits``."""
    rows, columns = logits_mv.shape
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits_mv):
        _differentiate[rows, triton.cdiv(columns, block)](
            logits_mv, labels_m.contiguous(), normalizer_m.contiguous(), factor_m.contiguous(),
            logits_mv.stride(0), columns, first, real, softcap, CAPPED=softcap > 0, BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "first", "real"])
def _normalize(
    logits, labels, both, of_row, rows, columns, first, real, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the log-sum-exp of a row's first ``real`` logits, and the logit of the row's label.

    A row has the logits of one token. The label's logit is 0 if another rank has the label's column, and −inf if the
    column is padding.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * of_row
    largest, total = tl.full([], NEVER, tl.float32), tl.full([], 0.0, tl.float32)
    for begin in range(0, real, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        logits_c = tl.load(logits + c, c < real, 0.0).to(tl.float32)
        if CAPPED:
            logits_c = softcap * _tanh(logits_c / softcap)
        logits_c = tl.where(c < real, logits_c, NEVER)
        larger = tl.maximum(largest, tl.max(logits_c, 0))
        # If all logits so far are −inf, −inf − (−inf) would be NaN.
        safe = tl.where(larger == NEVER, 0.0, larger)
        total = total * tl.exp(largest - safe) + tl.sum(tl.exp(logits_c - safe), 0)
        largest = larger
    tl.store(both + row, largest + tl.log(total))
    column = tl.load(labels + row) - first
    is_mine = (column >= 0) & (column < columns)
    target = tl.load(logits + column, is_mine, 0.0).to(tl.float32)
    if CAPPED:
        target = softcap * _tanh(target / softcap)
    tl.store(both + rows + row, tl.where(is_mine & (column >= real), NEVER, target))


@triton.jit(do_not_specialize=["first", "real"])
def _differentiate(
    logits, labels, normalizers, factors, of_row, columns, first, real, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite logits with (softmax − one-hot) · factor · (derivative of the soft-cap). Padding becomes 0."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * of_row
    logits_c = tl.load(logits + c, c < real, 0.0).to(tl.float32)
    factor_c = tl.full([BLOCK], 1.0, tl.float32) * tl.load(factors + row)
    if CAPPED:
        tanh_c = _tanh(logits_c / softcap)
        logits_c, factor_c = softcap * tanh_c, factor_c * (1 - tanh_c * tanh_c)
    softmax_c = tl.where(c < real, tl.exp(logits_c - tl.load(normalizers + row)), 0.0)
    label_c = (c == tl.load(labels + row) - first).to(tl.float32)
    tl.store(logits + c, ((softmax_c - label_c) * factor_c).to(logits.dtype.element_ty), c < columns)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
