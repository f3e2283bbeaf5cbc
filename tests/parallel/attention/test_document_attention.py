"""Attention inside documents equals attention with a dense mask, but needs no more memory than without documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.causal_attention import causal_within, documents_of
from fourfold.parallel.attention import document_attention
from fourfold.parallel.attention.block_attention import AttentionScores
from fourfold.parallel.attention.document_attention import (
    KeyLimits,
    attend_at_once,
    attend_documents,
    begins_of,
    differentiate_at_once,
    pieces_of,
)
from fourfold.verification.trace import trace
from tests.tiny_runs import LLAMA, tiny_run

ENDS = torch.tensor([[7, 8, 20, 20], [20, 20, 20, 20], [1, 9, 10, 20]])


def inputs(dtype: torch.dtype, kv_heads: int) -> list[Tensor]:
    """Return q, k, v, whose tokens are not next to one another in memory, and the output's gradient."""
    generator = torch.Generator().manual_seed(kv_heads)
    wide = torch.randn(3, 20, 8 + 2 * kv_heads, 16, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = wide[:, :, :4], wide[:, :, 8 : 8 + kv_heads], wide[:, :, 8 + kv_heads :]
    return [q, k, v, wide[:, :, 4:8]]


def with_gradients(attend: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = attend(q, k, v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.25, window: int = 0, softcap: float = 0.0) -> Tensor:
    mask = causal_within(documents_of(ENDS, q.shape[1]), window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    scores = softcap * (scale * (q @ k.mT) / softcap).tanh()
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def assert_equal_to_dense(tensors: list[Tensor], *options: float) -> None:
    """Compare with dense attention. ``options`` are scale, window, and softcap."""
    found = with_gradients(lambda q, k, v: attend_documents(q, k, v, ENDS, *options)[0], *tensors)
    exact = with_gradients(lambda q, k, v: dense(q, k, v, *options), *(t.double() for t in tensors))
    plain = with_gradients(lambda q, k, v: dense(q, k, v, *options), *tensors)
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        error, limit = (ours.double() - true).abs().max(), (theirs.double() - true).abs().max()
        assert error <= 3 * limit + 1e-12
        assert ours.dtype == tensors[0].dtype


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_document_attention_equals_dense_attention_with_a_mask(dtype: torch.dtype, kv_heads: int) -> None:
    assert_equal_to_dense(inputs(dtype, kv_heads), 0.25)


@pytest.mark.parametrize("queries", [3, 16], ids=["in pieces", "whole"])
@pytest.mark.parametrize(("window", "softcap"), [(5, 0.0), (1, 0.0), (0, 0.7), (5, 0.7), (99, 0.7)])
def test_windows_and_caps_equal_dense_attention(
    window: int, softcap: float, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_attention, "LEAST_QUERIES", queries)
    monkeypatch.setattr(document_attention, "MOST_QUERIES", queries)
    for dtype in (torch.float64, torch.float32):
        assert_equal_to_dense(inputs(dtype, 2), 0.3, window, softcap)


def dense_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor) -> Tensor:
    """Compute attention in a window of 5 tokens. The sinks add one column to the scores, but no value."""
    mask = causal_within(documents_of(ENDS, q.shape[1]), 5)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (0.3 * (q @ k.mT)).masked_fill(~mask, -torch.inf)
    column = sinks_N[:, None, None].expand(*scores.shape[:3], 1)
    return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sinks_are_one_more_score(dtype: torch.dtype) -> None:
    *qkv, grad = inputs(dtype, 2)
    sinks = torch.tensor([-20.0, -1.0, 0.5, 3.0], dtype=dtype)

    def run(attend: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))

    found = run(lambda q, k, v, sinks: attend_documents(q, k, v, ENDS, 0.3, 5, 0.0, sinks)[0], *qkv, sinks)
    exact = run(dense_with_sinks, *(t.double() for t in (*qkv, sinks)))
    plain = run(dense_with_sinks, *qkv, sinks)
    for ours, theirs, true in zip(found, plain, exact, strict=True):
        error, limit = (ours.double() - true).abs().max(), (theirs.double() - true).abs().max()
        assert error <= 3 * limit + 1e-12
        assert ours.dtype == dtype


def test_time_follows_the_window() -> None:
    """Without documents, count the keys of every piece."""
    q = torch.empty(1, 4096, 1, 8)
    pieces = list(pieces_of(KeyLimits(None, 64), q, AttentionScores(1.0)))
    assert sum(len(range(4096)[queries]) * len(range(4096)[keys]) for _, queries, keys in pieces) < 4096 * 128


def test_the_operators_keep_to_torchs_rules() -> None:
    """Check fake shapes and strides, aliasing, autograd's registration, and gradients by differences in float64."""
    q, k, v = (t.detach().requires_grad_() for t in inputs(torch.float64, 2)[:3])
    torch.library.opcheck(attend_documents, (q, k, v, ENDS, 0.25, 5, 0.7))
    assert torch.autograd.gradcheck(
        lambda *qkv: attend_documents(*qkv, ENDS, 0.25, 5, 0.7)[0], (q, k, v), fast_mode=True
    )
    sinks = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(attend_documents, (q, k, v, ENDS, 0.25, 5, 0.7, sinks))


def test_the_kernel_for_all_documents_has_the_shapes_that_are_said() -> None:
    """On ``meta`` tensors, torch's kernel returns results with the right shapes, so this test needs no GPU."""
    q, k, v, grad = (t.to("meta") for t in inputs(torch.bfloat16, 2))
    limits, scores = KeyLimits(ENDS.to("meta"), 5), AttentionScores(0.25)
    said = attend_documents(q, k, v, limits.document_ends_BE, 0.25, 5)
    found = attend_at_once(q, k, v, limits, scores)
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in said]
    gradients = differentiate_at_once((grad, q, k, v, found[0]), found[1], limits, scores)
    assert [(t.shape, t.dtype) for t in gradients] == [(t.shape, t.dtype) for t in (q, k, v)]
    begins = begins_of(KeyLimits(ENDS, 0), torch.empty(3, 20, 1, 1))
    assert begins_of(KeyLimits(None, 0), torch.empty(3, 20, 1, 1)).tolist() == [0, 20, 40, 60]
    assert begins.tolist() == [0, 7, 8, 20, 20, 40, 40, 40, 40, 41, 49, 50, 60] and begins.dtype == torch.int32


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("grid", [{}, {"x": 2, "y": 2}, {"cp": 2, "cp_method": "ulysses"}], ids=str)
@pytest.mark.parametrize("modules", [[], ["attention"]], ids=["whole", "attention again"])
def test_documents_cost_no_memory(grid: dict[str, Any], modules: list[str]) -> None:
    """Training on 32K tokens of packed documents needs as much memory as training on one text of this length, plus the
    tables of positions."""
    sections = {"activation_checkpoint": {"mode": "selective", "modules": modules} if modules else {}}
    peaks = []
    for mask_documents in (False, True):
        run = tiny_run(
            {**LLAMA, "max_position_embeddings": 32768},
            grid,
            training={"seq_length": 32768, "micro_batch_size": 2, "global_batch_size": 2, "device": "cuda"},
            data={"source": "python-stdlib", "mask_documents": mask_documents},
            **sections,
        )
        peaks.append(trace(run).memory.total_peak)
    assert peaks[1] <= 1.05 * peaks[0]
