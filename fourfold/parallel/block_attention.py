"""Attention of some queries to some keys with its log-sum-exp, and its backward from the merged result.

torch's public attention does not return the log-sum-exp, so its kernels are called by name. Queries are [B, N, Q, D],
keys and values [B, K, S, D], where K divides N.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATEN = torch.ops.aten

LSE_MULTIPLE = 32 if torch.version.hip is None else 1
"""CUDA's kernel for masks pads the queries of its log-sum-exps to a multiple of this; AMD's takes them as they are."""


def attend_block(
    q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, mask_B1QS: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, N, Q, D] and log-sum-exps [B, N, Q], float32; 0 and −∞ for a query that may see no key."""
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    bias = _bias(q_BNQD, mask_B1QS)
    if q_BNQD.device.type == "cpu":
        flash = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q_BNQD, k, v, 0.0, causal, attn_mask=bias)
    elif _is_flash(q_BNQD, bias):
        out, lse = ATEN._scaled_dot_product_flash_attention(q_BNQD, k, v, 0.0, causal)[:2]
    else:
        efficient = ATEN._scaled_dot_product_efficient_attention
        out, lse = efficient(q_BNQD, k, v, bias, True, 0.0, causal)[:2]
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. out and lse are over all keys, which makes the share of these keys exact."""
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    bias = _bias(q_BNQD, mask_B1QS)
    tensors = (grad_BNQD, q_BNQD, k, v)
    if q_BNQD.device.type == "cpu":
        backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*tensors, out_BNQD, lse_BNQ, 0.0, causal, attn_mask=bias)
    elif _is_flash(q_BNQD, bias):
        queries, keys = q_BNQD.shape[2], k.shape[2]
        no_dropout = torch.zeros((), dtype=torch.int64, device=q_BNQD.device)
        backward = ATEN._scaled_dot_product_flash_attention_backward
        lengths = (None, None, queries, keys)
        dq, dk, dv = backward(*tensors, out_BNQD, lse_BNQ.contiguous(), *lengths, 0.0, causal, no_dropout, no_dropout)
    else:
        no_dropout = torch.zeros((), dtype=torch.int64, device=q_BNQD.device)
        lse = torch.nn.functional.pad(lse_BNQ, (0, -lse_BNQ.shape[2] % LSE_MULTIPLE)).contiguous()
        backward = ATEN._scaled_dot_product_efficient_attention_backward
        wanted = (True, True, True, False)
        dq, dk, dv, _ = backward(*tensors, bias, out_BNQD, lse, no_dropout, no_dropout, 0.0, wanted, causal)
    return dq, _per_key_head(dk, k_BKSD), _per_key_head(dv, v_BKSD)


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
