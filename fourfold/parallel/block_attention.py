"""Attention of some queries to some keys with its log-sum-exp, and its backward from the merged result.

torch's public attention does not return the log-sum-exp, so its kernels are called by name; none of them caps scores,
which is done in single operations. Queries are [B, N, Q, D], keys and values [B, K, S, D], where K divides N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.models.autograd import Function, not_compiled
from fourfold.models.softcap import softcapped

ATEN = torch.ops.aten

LSE_MULTIPLE = 32 if torch.version.hip is None else 1
"""CUDA's kernel for masks pads the queries of its log-sum-exps to a multiple of this; AMD's takes them as they are."""


class Scores(NamedTuple):
    """The scores of queries and keys: scale · q·k, between −softcap and softcap where that is not 0."""

    scale: float
    softcap: float = 0.0


def attend_block(
    q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, mask_B1QS: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Outputs [B, N, Q, D] and log-sum-exps [B, N, Q], float32; 0 and −∞ for a query that may see no key."""
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    if scores.softcap:
        return _attend_capped(q_BNQD, k, v, _seen(q_BNQD, k, causal, mask_B1QS), scores)
    bias = _bias(q_BNQD, mask_B1QS)
    if q_BNQD.device.type == "cpu":
        flash = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q_BNQD, k, v, 0.0, causal, attn_mask=bias, scale=scores.scale)
    elif _is_flash(q_BNQD, bias):
        out, lse = ATEN._scaled_dot_product_flash_attention(q_BNQD, k, v, 0.0, causal, scale=scores.scale)[:2]
    else:
        efficient = ATEN._scaled_dot_product_efficient_attention
        out, lse = efficient(q_BNQD, k, v, bias, True, 0.0, causal, scale=scores.scale)[:2]
        lse = lse[..., : q_BNQD.shape[2]]  # the kernel pads the queries
    if mask_B1QS is not None:
        sees_none_B1Q = ~mask_B1QS.any(-1)
        lse = lse.masked_fill(sees_none_B1Q, -torch.inf)
        out = out.masked_fill(sees_none_B1Q[..., None], 0)
    return out, lse


def attend_block_backward(
    grad_BNQD: Tensor,
    q_BNQD: Tensor,
    out_BNQD: Tensor,
    lse_BNQ: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    causal: bool,
    mask_B1QS: Tensor | None,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. out and lse are over all keys, which makes the share of these keys exact."""
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    if scores.softcap:
        seen = _seen(q_BNQD, k, causal, mask_B1QS)
        dq, dk, dv = _differentiate_capped((grad_BNQD, q_BNQD, k, v, out_BNQD), lse_BNQ, seen, scores)
        return dq, _per_key_head(dk, k_BKSD), _per_key_head(dv, v_BKSD)
    bias = _bias(q_BNQD, mask_B1QS)
    tensors = (grad_BNQD, q_BNQD, k, v)
    if q_BNQD.device.type == "cpu":
        backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*tensors, out_BNQD, lse_BNQ, 0.0, causal, attn_mask=bias, scale=scores.scale)
    elif _is_flash(q_BNQD, bias):
        queries, keys = q_BNQD.shape[2], k.shape[2]
        no_dropout = torch.zeros((), dtype=torch.int64, device=q_BNQD.device)
        backward = ATEN._scaled_dot_product_flash_attention_backward
        lengths = (None, None, queries, keys)
        given = (*tensors, out_BNQD, lse_BNQ.contiguous(), *lengths)
        dq, dk, dv = backward(*given, 0.0, causal, no_dropout, no_dropout, scale=scores.scale)
    else:
        no_dropout = torch.zeros((), dtype=torch.int64, device=q_BNQD.device)
        lse = torch.nn.functional.pad(lse_BNQ, (0, -lse_BNQ.shape[2] % LSE_MULTIPLE)).contiguous()
        backward = ATEN._scaled_dot_product_efficient_attention_backward
        wanted = (True, True, True, False)
        given = (*tensors, bias, out_BNQD, lse, no_dropout, no_dropout)
        dq, dk, dv, _ = backward(*given, 0.0, wanted, causal, scale=scores.scale)
    return dq, _per_key_head(dk, k_BKSD), _per_key_head(dv, v_BKSD)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """``attend_block`` in single operations, with a key-value head for each query head; the softmax is in float32."""
    precise = _precise(q)
    capped = softcapped(scores.scale * (q @ k.mT).to(precise), scores.softcap).masked_fill_(~seen, -torch.inf)
    lse = capped.logsumexp(-1)
    weights = _weights(capped, lse)
    return weights.to(v.dtype) @ v, lse


def _differentiate_capped(
    tensors: tuple[Tensor, ...], lse: Tensor, seen: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """tensors: the output's gradient, q, k, v and the output."""
    grad, q, k, v, out = tensors
    precise = _precise(q)
    capped = softcapped(scores.scale * (q @ k.mT).to(precise), scores.softcap)
    slopes = 1 - (capped / scores.softcap).square()
    weights = _weights(capped.masked_fill_(~seen, -torch.inf), lse)
    dv = weights.to(grad.dtype).mT @ grad
    projected = (grad.to(precise) * out.to(precise)).sum(-1, keepdim=True)
    d_scores = (weights * ((grad @ v.mT).to(precise) - projected) * slopes * scores.scale).to(q.dtype)
    return d_scores @ k, d_scores.mT @ q, dv


def _weights(capped: Tensor, lse: Tensor) -> Tensor:
    """The softmax, 0 in rows that see no key."""
    return (capped - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()


def _precise(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _seen(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """True where a query may see a key."""
    if mask is not None:
        return mask
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return seen.tril() if causal else seen


@not_compiled
def attend_masked(q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1QS: Tensor, scores: Scores) -> Tensor:
    """The outputs of ``attend_block`` under a mask, [B, N, Q, D], through which gradients go."""
    out_BNQD: Tensor = _Masked.apply(q_BNQD, k_BKSD, v_BKSD, mask_B1QS, scores)
    return out_BNQD


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask_B1QS: Tensor, scores: Scores) -> Tensor:
        out, lse = attend_block(q, k, v, False, mask_B1QS, scores)
        ctx.save_for_backward(q, k, v, out, lse, mask_B1QS)
        ctx.scores = scores
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse, mask_B1QS = ctx.saved_tensors
        gradients = attend_block_backward(grad, q, out, lse, k, v, False, mask_B1QS, ctx.scores)
        return *gradients, None, None


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    """CUDA's flash kernel supports neither masks nor float32."""
    return bias is None and q.dtype != torch.float32


def _bias(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as all kernels take it: 0 where a key is seen and −∞ elsewhere, in the queries' type."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    return bias.expand(-1, q.shape[1], -1, -1) if q.device.type == "cuda" else bias


def _per_query_head(q: Tensor, kv: Tensor) -> Tensor:
    """Keys or values, repeated for all query heads that share them."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _per_key_head(gradient: Tensor, kv: Tensor) -> Tensor:
    summed: Tensor = gradient.unflatten(1, (kv.shape[1], -1)).sum(2)
    return summed
