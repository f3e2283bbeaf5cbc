"""Causal attention over sequences that are split over the context axis cp. The ranks of cp pass keys and values around
a ring.

This is ring attention (Liu et al. 2023, arXiv 2310.01889) with the head-tail layout of the module ``context``. In each
step, a rank attends to the keys and values of one rank, at first its own. Meanwhile it receives the keys and values for
the next step. The rank merges the outputs of the steps, weighted by their log-sum-exps. The backward pass sends keys
and values around the ring again, together with their gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold.models.autograd import Function
from fourfold.models.causal_attention import documents_of
from fourfold.parallel.attention.block_attention import (
    AttentionScores,
    attend_block,
    attend_block_backward,
    join_sinks,
    sink_gradient,
)
from fourfold.parallel.attention.context import take_chunks
from fourfold.parallel.grid.communicate import Pending, start_rotate
from fourfold.parallel.grid.grid import Axis

KEYS_AND_VALUES, THEIR_GRADIENTS = "attention: keys and values", "attention: keys' and values' gradients"


def ring_attention(
    q_BTND: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    document_ends_BE: Tensor | None,
    cp: Axis,
    scores: AttentionScores,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Run attention of this rank's queries to the keys of all cp ranks.

    Args:
        q_BTND: This rank's queries.
        k_BTKD: This rank's keys.
        v_BTKD: This rank's values.
        document_ends_BE: The position after the last token of each document, in the whole sequence
            (``attend_documents``). None means that each sequence is one document.
        cp: The context axis.
        scores: Scale and soft-cap of the scores.
        window: Number of tokens that a query sees, including itself. 0 means all.
        sinks_N: The sink of each head (``join_sinks``). None if the model has no sinks.

    Returns:
        The outputs of this rank's queries, [B, T, N, D].
    """
    documents_BS = None if document_ends_BE is None else documents_of(document_ends_BE, q_BTND.shape[1] * cp.size)
    q, k, v = (t.transpose(1, 2) for t in (q_BTND, k_BTKD, v_BTKD))
    out_BNTD = _Ring.apply(q, k, v, sinks_N, documents_BS, cp, scores, window)
    return out_BNTD.transpose(1, 2)


@dataclass(frozen=True)
class VisibleBlock:
    """A slice of the queries and a slice of the keys. One ring step computes the attention between these two slices.

    ``causal`` and ``mask_B1QK`` have the same meaning as in ``attend_block``.
    """

    queries: slice
    keys: slice
    causal: bool
    mask_B1QK: Tensor | None


def block_of_step(
    source: int, tokens: int, documents_BS: Tensor | None, cp: Axis, window: int, device: torch.device
) -> VisibleBlock | None:
    """Return the queries that may see a key in a ring step, and the keys that they may see.

    Args:
        source: The rank whose keys this rank has now.
        tokens: Number of queries of this rank. ``source`` has the same number of keys.
        documents_BS: For each token of the whole sequence, the index of its document. None if attention may cross
            documents.
        cp: The context axis.
        window: Number of tokens that a query sees, including itself. 0 means all.
        device: Device of the mask.

    Returns:
        A slice of this rank's queries, a slice of the keys of ``source``, and their mask. None if all of these keys lie
        before the windows of all queries.
    """
    everything, half = slice(0, tokens), tokens // 2
    if source == cp.rank:
        queries, keys = everything, everything
    elif source < cp.rank:
        # Every rank has a head chunk and a tail chunk of the sequence. The source's head chunk comes before both chunks
        # of this rank. The source's tail chunk comes after both, so no query sees it.
        queries, keys = everything, slice(0, half)
    else:
        # This rank's tail chunk comes after both chunks of the source. This rank's head chunk comes before both, so its
        # queries see none of the keys.
        queries, keys = slice(half, tokens), everything
    causal, length = source == cp.rank, tokens * cp.size
    if not causal and window:
        if (abs(source - cp.rank) - 1) * half + 1 >= window:
            return None
        # One pair of chunks is furthest apart: the head chunk of the source and the tail chunk of this rank, or the
        # reverse. If the window does not reach from one chunk to the other, leave this pair out.
        if (2 * cp.size - 2 - source - cp.rank) * half + 1 >= window:
            queries, keys = (slice(0, half), keys) if source < cp.rank else (queries, slice(half, tokens))
    if documents_BS is None and not 0 < window < length:
        return VisibleBlock(queries, keys, causal, None)
    mask_BQK = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    if documents_BS is not None:
        ours_BQ, theirs_BK = _of_both(documents_BS, source, queries, keys, cp)
        mask_BQK = ours_BQ[:, :, None] == theirs_BK[:, None, :]
    if window:
        ours_1Q, theirs_1K = _of_both(torch.arange(length, device=device)[None], source, queries, keys, cp)
        mask_BQK = mask_BQK & (ours_1Q[:, :, None] - theirs_1K[:, None, :] < window)
    return VisibleBlock(queries, keys, False, (mask_BQK.tril() if causal else mask_BQK)[:, None])


def _of_both(t_BS: Tensor, source: int, queries: slice, keys: slice, cp: Axis) -> tuple[Tensor, Tensor]:
    """Return the entries of ``t_BS`` for a block's queries and for its keys."""
    return take_chunks(t_BS, cp.rank, cp.size)[:, queries], take_chunks(t_BS, source, cp.size)[:, keys]


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        sinks_N: Tensor | None,
        documents_BS: Tensor | None,
        cp: Axis,
        scores: AttentionScores,
        window: int,
    ) -> Tensor:
        out_BNTD = torch.zeros_like(q_BNTD, dtype=torch.float32)
        lse_BNT = torch.full(q_BNTD.shape[:3], -torch.inf, device=q_BNTD.device)
        kv = torch.stack([k_BKTD, v_BKTD])
        for step in range(cp.size):
            following = start_rotate(kv, cp, KEYS_AND_VALUES) if step + 1 < cp.size else None
            source = (cp.rank - step) % cp.size
            block = block_of_step(source, q_BNTD.shape[2], documents_BS, cp, window, kv.device)
            if block is not None:
                rows, (k, v) = block.queries, kv[..., block.keys, :]
                part, part_lse = attend_block(q_BNTD[:, :, rows], k, v, block.causal, block.mask_B1QK, scores)
                merge(out_BNTD[:, :, rows], lse_BNT[:, :, rows], part, part_lse)
            if following is not None:
                kv = following.wait()
        if sinks_N is not None:
            share_BNT, lse_BNT = join_sinks(lse_BNT, sinks_N)
            out_BNTD.mul_(share_BNT[..., None])
        out_BNTD = out_BNTD.to(q_BNTD.dtype)
        ctx.save_for_backward(q_BNTD, k_BKTD, v_BKTD, out_BNTD, lse_BNT, sinks_N, documents_BS)
        ctx.cp, ctx.scores, ctx.window = cp, scores, window
        return out_BNTD

    @staticmethod
    def backward(ctx: Any, grad_BNTD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks_N, documents_BS = ctx.saved_tensors
        cp: Axis = ctx.cp
        d_sinks = sink_gradient(grad_BNTD, out, lse, sinks_N) if ctx.needs_input_grad[3] else None
        dq = torch.zeros_like(q, dtype=torch.float32)
        kv = torch.stack([k, v])
        dkv_coming: Pending | None = None
        for step in range(cp.size):
            following = start_rotate(kv, cp, KEYS_AND_VALUES) if step + 1 < cp.size else None
            source = (cp.rank - step) % cp.size
            block = block_of_step(source, q.shape[2], documents_BS, cp, ctx.window, kv.device)
            if block is not None:
                rows, (k, v) = block.queries, kv[..., block.keys, :]
                grad_rows, q_rows, out_rows, lse_rows = (t[:, :, rows] for t in (grad_BNTD, q, out, lse))
                dq_part, dk, dv = attend_block_backward(
                    grad_rows, q_rows, out_rows, lse_rows, k, v, block.causal, block.mask_B1QK, ctx.scores
                )
                dq[:, :, rows] += dq_part
            # Receive the gradients of these keys and values. They are sums over the ranks that had these keys earlier.
            dkv = torch.zeros_like(kv, dtype=torch.float32) if dkv_coming is None else dkv_coming.wait()
            if block is not None:
                dkv[..., block.keys, :] += torch.stack([dk, dv])
            dkv_coming = start_rotate(dkv, cp, THEIR_GRADIENTS)
            if following is not None:
                kv = following.wait()
        assert dkv_coming is not None
        # After a full round, the gradients of this rank's own keys and values have returned.
        dk, dv = dkv_coming.wait().to(q.dtype)
        return dq.to(q.dtype), dk, dv, d_sinks, None, None, None, None


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the result for another block of keys into the result so far, in place.

    The first block has the rank's own keys, so every query sees at least one key. So merged log-sum-exps are finite.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(part, (part_lse - both).exp_()[..., None])
    lse.copy_(both)
