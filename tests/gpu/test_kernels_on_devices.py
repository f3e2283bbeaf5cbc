"""Attention and grouped matmuls compared with float64, at awkward sizes: odd lengths, every head width and grouping
that a kernel handles in a special way, masks with rows that see nothing, and groups without rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fourfold.models.grouped import Groups, grouped_matmul, has_kernel
from fourfold.parallel.attention.block_attention import AttentionScores, attend_block, attend_block_backward
from fourfold.parallel.attention.document_attention import attend_documents, attend_documents_backward

Record = Callable[[str, object], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""The largest allowed relative error (2-norm) of a kernel in each dtype."""


def normal(*shapes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Draw tensors that have the same values on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def plain_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, seen: Tensor, softcap: float) -> list[Tensor]:
    """Compute attention by its definition, and the gradients of q, k, and v: [B, N, S, D] in float64."""
    grad = grad.double()
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    keys, values = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    out = weights @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "capped"])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "heads", "kv"),
    [
        (500, 500, 64, 8, 2),
        (77, 300, 96, 7, 1),
        (1, 33, 128, 4, 4),
        (333, 333, 80, 4, 1),
        (130, 130, 256, 2, 2),
        (65, 65, 72, 8, 1),
        (50, 50, 20, 2, 1),
        (50, 50, 288, 2, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_attention_is_exact(
    dtype: str,
    queries: int,
    keys: int,
    width: int,
    heads: int,
    kv: int,
    kind: str,
    device: torch.device,
    record_property: Record,
) -> None:
    if kind == "causal" and queries != keys:
        pytest.skip("a causal mask is for as many queries as keys")
    shapes = (2, heads, queries, width), (2, kv, keys, width), (2, kv, keys, width), (2, heads, queries, width)
    q, k, v, grad = normal(*shapes, device=device, dtype=DTYPES[dtype])
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if kind == "causal":
        seen = seen.tril()
    if kind in ("mask", "capped"):
        seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)).to(device) < 0.5
        seen[0, 0] = True
        # With several rows, hide all keys from one row.
        seen[queries // 2] = queries == 1
    mask = seen[None, None].expand(2, 1, -1, -1) if kind in ("mask", "capped") else None
    softcap = 0.7 if kind == "capped" else 0.0
    how = kind == "causal", mask, AttentionScores(width**-0.5, softcap)
    out, lse = attend_block(q, k, v, *how)
    # The row without keys in this block has keys in other blocks of the sequence, so its total log-sum-exp is finite.
    found = out, *attend_block_backward(grad, q, out, lse.masked_fill(lse.isneginf(), 0), k, v, *how)
    exact = plain_attention(q, k, v, grad, seen, softcap)
    errors = [relative(a, b) for a, b in zip(found, exact, strict=True)]
    record_property("errors", errors)
    assert all(error < LIMITS[dtype] for error in errors), errors
    if mask is not None and queries > 1:
        assert not out[:, :, queries // 2].any() and not found[1][:, :, queries // 2].any()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("length", "width", "heads", "kv", "window"),
    [
        (513, 64, 8, 2, 0),
        (1000, 128, 7, 1, 0),
        (257, 256, 4, 4, 0),
        (513, 96, 8, 8, 100),
        (300, 80, 4, 2, 2),
        (77, 20, 4, 2, 9),
        (65, 288, 2, 1, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_documents_and_windows_are_exact(
    dtype: str, length: int, width: int, heads: int, kv: int, window: int, device: torch.device, record_property: Record
) -> None:
    """Documents have one token, a third of the sequence, or all of it."""
    shapes = [(2, length, count, width) for count in (heads, kv, kv, heads)]
    q, k, v, grad = normal(*shapes, device=device, dtype=DTYPES[dtype])
    ends = torch.tensor([[1, length // 3, length // 2, length, length], [length] * 5], device=device)
    document = torch.searchsorted(ends, torch.arange(length, device=device).repeat(2, 1), right=True)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    if window:
        seen = seen.triu(1 - window)
    out, lse = attend_documents(q, k, v, ends, width**-0.5, window)
    found = out, *attend_documents_backward(grad, q, k, v, out, lse, ends, width**-0.5, window, 0.0)
    exact = plain_attention(*(t.transpose(1, 2) for t in (q, k, v, grad)), seen[:, None], softcap=0.0)
    errors = [relative(a, b.transpose(1, 2)) for a, b in zip(found, exact, strict=True)]
    record_property("errors", errors)
    assert all(error < LIMITS[dtype] for error in errors), errors


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("inputs", "outputs", "sizes"),
    [
        (64, 48, [5, 0, 17, 1]),
        (72, 40, [16, 3]),
        (36, 20, [0, 2, 9]),
        (512, 1408, [0, 0, 0, 9]),
        (2048, 768, [0, 300, 1, 0, 511, 7, 0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_grouped_matmuls_are_exact(
    dtype: str,
    inputs: int,
    outputs: int,
    sizes: list[int],
    is_turned: bool,
    device: torch.device,
    record_property: Record,
) -> None:
    shapes = (sum(sizes), inputs), (len(sizes), outputs, inputs), (sum(sizes), outputs)
    rows, weights, grad = normal(*shapes, device=device, dtype=DTYPES[dtype])
    if is_turned:  # Experts are stored like this if each of them is split over ranks.
        weights = weights.transpose(0, 1).contiguous().transpose(0, 1)
    operands = rows.requires_grad_(), weights.requires_grad_()
    # Fill memory with NaN and free it. The kernel's output reuses this memory, so values that the kernel does not write
    # stay NaN.
    poison = [torch.full_like(weights, torch.nan) for _ in range(4)]
    del poison
    # Create the sizes on the device, because behind a router the host does not know them either.
    groups = Groups(torch.tensor(sizes, device=device))
    out = grouped_matmul(*operands, groups)
    found = out, *torch.autograd.grad(out, operands, grad)
    exact_operands = [tensor.detach().double().requires_grad_() for tensor in operands]
    parts = zip(exact_operands[0].split(sizes), exact_operands[1], strict=True)
    exact_out = torch.cat([part @ weight.T for part, weight in parts])
    exact = exact_out, *torch.autograd.grad(exact_out, exact_operands, grad.double())
    errors = [relative(a.detach(), b.detach()) for a, b in zip(found, exact, strict=True)]
    record_property("errors", errors)
    record_property("torch's grouped kernel", has_kernel(rows, weights, inputs, outputs))
    assert all(error < (1e-5 if dtype == "float32" else 1e-2) for error in errors), errors
    assert not found[2][[number for number, size in enumerate(sizes) if not size]].any()
