"""Compute attention to one block of keys, and the gradients of this attention.

If a query attends to several blocks, the caller merges the blocks' outputs, weighted by the blocks' log-sum-exps. The
backward pass of each block reads the merged outputs and the merged log-sum-exps.

torch's public attention does not return log-sum-exps, so this module calls torch's internal kernels. None of these
kernels can soft-cap scores, so attention with soft-capping runs as separate operations. Queries are [B, N, Q, D], keys
and values are [B, K, S, D]: B sequences, N query heads, Q queries, K key-value heads, S keys, and D channels per head.
K divides N.
"""

import os
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fourfold.models.autograd import Function, not_compiled
from fourfold.models.softcap import softcapped

ATEN = torch.ops.aten

LSE_MULTIPLE = 32 if torch.version.hip is None else 1
"""CUDA's memory-efficient kernel pads the last dim of its log-sum-exps (the queries) to a multiple of this number.
AMD's kernel does not pad."""


BIAS_MULTIPLE = 16
"""In CUDA's memory-efficient kernel, each row of a mask must start at a multiple of this number of entries. So this
module pads the rows, as torch's public attention does."""

WIDTH_MULTIPLE, WIDEST_FLASH, WIDEST_CUDNN = 8, 256, 128
"""Limits on the head dim in CUDA's kernels.

- The head dim must be a multiple of ``WIDTH_MULTIPLE``. This module pads it, as torch's public attention does.
- FlashAttention supports head dims up to ``WIDEST_FLASH``.
- This module uses cuDNN up to ``WIDEST_CUDNN``, and FlashAttention above it. On Hopper, torch 2.11 uses cuDNN up to a
  head dim of 256, but later versions do so only with cuDNN 9.23 or newer.
"""

CUDNN = 91500
"""torch's public attention prefers cuDNN if cuDNN's version is above this number, which means 9.15.0
(``check_prefer_cudnn_attention`` in torch's sdp_utils.cpp)."""

CAPPED_ROWS = 512
"""With soft-capping, the scores of at most this many queries are in memory at once. With this limit, the memory for
scores does not grow with the number of queries."""


class AttentionScores(NamedTuple):
    """How scores are computed: scale · q·k. If softcap is not 0, each score becomes softcap · tanh(score / softcap)."""

    scale: float
    softcap: float = 0.0


def attend_block(
    q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, mask_B1QS: Tensor | None, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Compute the attention of some queries to a block of keys.

    Args:
        q_BNQD: Queries.
        k_BKSD: Keys. K divides N.
        v_BKSD: Values.
        causal: If True, query i sees only the keys up to i. The block must then have one key per query.
        mask_B1QS: True if a query may see a key. With None, only ``causal`` limits which keys a query sees.
        scores: Scale and soft-cap of the scores.

    Returns:
        The outputs [B, N, Q, D] and the log-sum-exps [B, N, Q] in float32. If a query sees no key, its output is 0 and
        its log-sum-exp is −∞.
    """
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    if scores.softcap:
        return _attend_capped(q_BNQD, k, v, causal, mask_B1QS, scores)
    bias, kernel = _bias(q_BNQD, mask_B1QS), kernel_for(q_BNQD, k, mask_B1QS is not None)
    q, k, v = (q_BNQD, k, v) if kernel == "cpu" else padded(q_BNQD, k, v)
    if kernel == "cpu":
        flash = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scores.scale)
    elif kernel == "flash":
        out, lse = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scores.scale)[:2]
    elif kernel == "cudnn":
        cudnn = ATEN._scaled_dot_product_cudnn_attention
        out, lse = cudnn(q, k, v, None, True, 0.0, causal, scale=scores.scale)[:2]
        lse = lse.view(q.shape[:3])  # The kernel's log-sum-exp has a fourth dim of size 1.
    else:
        efficient = ATEN._scaled_dot_product_efficient_attention
        out, lse = efficient(q, k, v, bias, True, 0.0, causal, scale=scores.scale)[:2]
        lse = lse[..., : q.shape[2]]  # Remove the padding that the kernel added to the queries.
    out = out[..., : q_BNQD.shape[-1]]
    if mask_B1QS is not None:
        sees_none_B1Q = ~mask_B1QS.any(-1)
        lse = lse.masked_fill(sees_none_B1Q, -torch.inf)
        out = out.masked_fill(sees_none_B1Q[..., None], 0)
    return out, lse


def join_sinks(lse_NT: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """Add each head's sink to the softmax (GPT-OSS). A sink is one more score, without a value vector.

    Args:
        lse_NT: The log-sum-exps of the queries over all keys, [N, T] or [B, N, T].
        sinks_N: The sink of each head.

    Returns:
        The factors that the caller must multiply the outputs by, and log-sum-exps that include the sinks. Pass these
        log-sum-exps and the multiplied outputs to ``attend_block_backward``, to get exact gradients of q, k, and v.
    """
    all_NT = torch.logaddexp(lse_NT, sinks_N.to(lse_NT.dtype)[:, None])
    return (lse_NT - all_NT).exp_(), all_NT


def sink_gradient(grad_NTD: Tensor, out_NTD: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the gradient of the sinks. The outputs and log-sum-exps must include the sinks (``join_sinks``)."""
    weights_NT = (sinks_N.to(lse_NT.dtype)[:, None] - lse_NT).exp_()
    projected_NT = (grad_NTD * out_NTD.to(lse_NT.dtype)).sum(-1)
    return (weights_NT * projected_NT).sum(-1).view(-1, len(sinks_N)).sum(0).neg().to(sinks_N.dtype)


def attend_block_backward(
    grad_BNQD: Tensor,
    q_BNQD: Tensor,
    out_BNQD: Tensor,
    lse_BNQ: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    causal: bool,
    mask_B1QS: Tensor | None,
    scores: AttentionScores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of attention to a block of keys.

    Args:
        grad_BNQD: The gradient of the merged outputs.
        q_BNQD: Queries.
        out_BNQD: The outputs, merged over all blocks of keys.
        lse_BNQ: The log-sum-exps, merged over all blocks of keys.
        k_BKSD: Keys of the block.
        v_BKSD: Values of the block.
        causal: See ``attend_block``.
        mask_B1QS: See ``attend_block``.
        scores: Scale and soft-cap of the scores.

    Returns:
        The gradients of q, k, and v. The caller must sum the gradients of q over all blocks.
    """
    k, v = _per_query_head(q_BNQD, k_BKSD), _per_query_head(q_BNQD, v_BKSD)
    if scores.softcap:
        of_queries = (grad_BNQD, q_BNQD, out_BNQD)
        dq, dk, dv = _differentiate_capped(of_queries, lse_BNQ, k, v, causal, mask_B1QS, scores)
        return dq, _per_key_head(dk, k_BKSD), _per_key_head(dv, v_BKSD)
    bias, kernel = _bias(q_BNQD, mask_B1QS), kernel_for(q_BNQD, k, mask_B1QS is not None)
    tensors: tuple[Tensor, ...] = (grad_BNQD, q_BNQD, k, v, out_BNQD)
    tensors = tensors if kernel == "cpu" else padded(*tensors)
    if kernel == "cpu":
        backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*tensors, lse_BNQ, 0.0, causal, attn_mask=bias, scale=scores.scale)
    else:
        no_dropout = 2 * [torch.zeros((), dtype=torch.int64, device=q_BNQD.device)]
        lengths = (None, None, q_BNQD.shape[2], k.shape[2])
        if kernel == "flash":
            backward = ATEN._scaled_dot_product_flash_attention_backward
            given = (*tensors, lse_BNQ.contiguous(), *lengths, 0.0, causal, *no_dropout)
            dq, dk, dv = backward(*given, scale=scores.scale)
        elif kernel == "cudnn":
            backward = ATEN._scaled_dot_product_cudnn_attention_backward
            given = (*tensors, lse_BNQ.contiguous()[..., None], *no_dropout, None, *lengths, 0.0, causal)
            dq, dk, dv = backward(*given, scale=scores.scale)
        else:
            lse = torch.nn.functional.pad(lse_BNQ, (0, -lse_BNQ.shape[2] % LSE_MULTIPLE)).contiguous()
            backward = ATEN._scaled_dot_product_efficient_attention_backward
            under_bias = (*tensors[:4], bias, tensors[4], lse, *no_dropout)
            dq, dk, dv, _ = backward(*under_bias, 0.0, (True, True, True, False), causal, scale=scores.scale)
    dq, dk, dv = (gradient[..., : q_BNQD.shape[-1]] for gradient in (dq, dk, dv))
    return dq, _per_key_head(dk, k_BKSD), _per_key_head(dv, v_BKSD)


def kernel_for(q_BNQD: Tensor, k_BNSD: Tensor, is_masked: bool) -> Literal["cpu", "flash", "cudnn", "efficient"]:
    """Choose torch's kernel for a block of attention without soft-capping.

    CUDA's flash kernel and cuDNN's kernel need half precision, and this module uses them only without a mask. cuDNN's
    kernel needs more than one key.
    """
    width = q_BNQD.shape[-1]
    if q_BNQD.device.type == "cpu":
        return "cpu"
    if is_masked or q_BNQD.dtype not in (torch.bfloat16, torch.float16) or width > WIDEST_FLASH:
        return "efficient"
    return "cudnn" if width <= WIDEST_CUDNN and k_BNSD.shape[2] > 1 and prefers_cudnn(q_BNQD.device) else "flash"


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether torch's public attention prefers cuDNN on this GPU (Hopper and data center Blackwell).

    The backward pass of cuDNN is not deterministic. So return False if torch must use deterministic algorithms.
    """
    is_strict = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if is_strict or torch.version.hip is not None or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    is_wanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return is_wanted and major in (9, 10) and minor in (0, 3) and (torch.backends.cudnn.version() or 0) > CUDNN


def padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad the head dim with zeros to a multiple of ``WIDTH_MULTIPLE``."""
    missing = -tensors[0].shape[-1] % WIDTH_MULTIPLE
    return tuple(torch.nn.functional.pad(tensor, (0, missing)) for tensor in tensors) if missing else tensors


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Compute what ``attend_block`` computes, with soft-capping. k and v must have one head per query head.

    The softmax is in float32, or in float64 if the queries are float64.
    """
    precise = _precise(q)
    outs, lses = [], []
    for rows in _rows(q):
        raw = (q[:, :, rows] @ k.mT).to(precise)
        capped = softcapped(scores.scale * raw, scores.softcap)
        capped = capped.masked_fill_(~_seen(q, k, rows, causal, mask), -torch.inf)
        lse = capped.logsumexp(-1)
        outs.append(_weights(capped, lse).to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _differentiate_capped(
    tensors: tuple[Tensor, ...],
    lse_of_all: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    scores: AttentionScores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, and v for attention with soft-capping, ``CAPPED_ROWS`` queries at a time.

    Args:
        tensors: The output's gradient, q, and the output.
        lse_of_all: The log-sum-exps of all queries.
    """
    of_all = tensors[1]
    precise = _precise(of_all)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=precise), torch.zeros_like(v, dtype=precise)
    for rows in _rows(of_all):
        grad, q, out = (tensor[:, :, rows] for tensor in tensors)
        capped = softcapped(scores.scale * (q @ k.mT).to(precise), scores.softcap)
        slopes = 1 - (capped / scores.softcap).square()
        seen = _seen(of_all, k, rows, causal, mask)
        weights = _weights(capped.masked_fill_(~seen, -torch.inf), lse_of_all[:, :, rows])
        dv += weights.to(grad.dtype).mT @ grad
        projected = (grad.to(precise) * out.to(precise)).sum(-1, keepdim=True)
        d_scores = (weights * ((grad @ v.mT).to(precise) - projected) * slopes * scores.scale).to(q.dtype)
        dqs.append(d_scores @ k)
        dk += d_scores.mT @ q
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


def _rows(q: Tensor) -> list[slice]:
    return [slice(first, first + CAPPED_ROWS) for first in range(0, q.shape[2], CAPPED_ROWS)]


def _weights(capped: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax weights. If a query sees no key, its weights are 0."""
    return (capped - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()


def _precise(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _seen(q: Tensor, k: Tensor, rows: slice, causal: bool, mask: Tensor | None) -> Tensor:
    """Return the mask of the queries in ``rows``: True if a query sees a key."""
    if mask is not None:
        return mask[:, :, rows]
    seen = torch.ones(q[:, :, rows].shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return seen.tril(rows.start) if causal else seen


@not_compiled
def attend_masked(
    q_BNQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask_B1QS: Tensor, scores: AttentionScores, sinks_N: Tensor | None
) -> Tensor:
    """Run attention under a mask, and return the outputs, [B, N, Q, D]. Autograd can differentiate them.

    Args:
        sinks_N: The sink of each head (``join_sinks``). None if the model has no sinks.
    """
    return _Masked.apply(q_BNQD, k_BKSD, v_BKSD, sinks_N, mask_B1QS, scores)


class _Masked(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None, mask_B1QS: Tensor, scores: AttentionScores
    ) -> Tensor:
        out, lse = attend_block(q, k, v, False, mask_B1QS, scores)
        if sinks_N is not None:
            share, lse = join_sinks(lse, sinks_N)
            out = out.mul_(share[..., None])
        ctx.save_for_backward(q, k, v, out, lse, sinks_N, mask_B1QS)
        ctx.scores = scores
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks_N, mask_B1QS = ctx.saved_tensors
        d_sinks = sink_gradient(grad, out, lse, sinks_N) if ctx.needs_input_grad[3] else None
        gradients = attend_block_backward(grad, q, out, lse, k, v, False, mask_B1QS, ctx.scores)
        return *gradients, d_sinks, None, None


def _bias(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """Convert the mask to the form that kernels add to the scores: 0 for visible keys and −∞ for hidden keys.

    On a GPU, the rows are aligned (``BIAS_MULTIPLE``).
    """
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    if q.device.type != "cuda":
        return bias
    aligned = torch.nn.functional.pad(bias, (0, -bias.shape[-1] % BIAS_MULTIPLE))[..., : bias.shape[-1]]
    return aligned.expand(q.shape[0], q.shape[1], -1, -1)


def _per_query_head(q: Tensor, kv: Tensor) -> Tensor:
    """Repeat each key or value head for all query heads that share it."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _per_key_head(gradient: Tensor, kv: Tensor) -> Tensor:
    summed: Tensor = gradient.unflatten(1, (kv.shape[1], -1)).sum(2)
    return summed
