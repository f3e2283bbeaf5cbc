"""Causal attention within the documents of packed sequences, and within a sliding window.

This module needs no mask over whole sequences. So it needs no more memory than plain causal attention. With short
documents or short windows, it also takes less time. The callers restart the positions of tokens in each document
(``data.dataset.positions_of``).

On a GPU, one call of FlashAttention 2 (Dao 2023, arXiv 2307.08691) handles all documents if the kernel supports the
inputs. Otherwise each document, or each piece of its queries, takes one call. torch.compile treats both variants as
opaque operators.

cuDNN's kernel is faster on Hopper, but torch's operators for this kernel do not support windows. We do not use torch's
public ``varlen_attn`` either: in torch 2.13, it never calls cuDNN, and it refuses grouped key-value heads on Hopper.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.parallel.attention.block_attention import (
    ATEN,
    WIDEST_FLASH,
    AttentionScores,
    attend_block,
    attend_block_backward,
    join_sinks,
    padded,
    sink_gradient,
)

Tensors = tuple[Tensor, ...]

LEAST_QUERIES, MOST_QUERIES = 16, 512
"""If there is a window or a soft-cap, attention runs for one piece of a document's queries at a time. Pieces have as
many queries as the window, but at least ``LEAST_QUERIES`` and at most ``MOST_QUERIES``. With larger pieces, the kernels
would compute more scores that the window hides."""


class KeyLimits(NamedTuple):
    """Limits on which keys a query sees: only keys of its own document, and within its window.

    The fields have the same meaning as the arguments of ``attend_documents``.
    """

    document_ends_BE: Tensor | None
    window: int


@torch.library.custom_op("fourfold::attend_documents", mutates_args=())
def attend_documents(
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    document_ends_BE: Tensor | None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run causal attention within documents.

    Args:
        document_ends_BE: the position after the last token of each document, in ascending order. One row has the ends
            of one sequence. The last end in each row is S. Rows with fewer than E documents repeat S. None means that
            each sequence is one document.
        window: the number of tokens that a query sees, including itself. 0 means no window.
        scale: the factor that the scores q·k are multiplied by.
        softcap: the soft-cap of the scores (``AttentionScores``). 0 means no soft-capping.
        sinks_N: the sink of each head (``join_sinks``). None if the model has no sinks.

    Returns:
        The outputs [B, S, N, D], and the log-sum-exps [N, B·S] for the backward pass.
    """
    limits, scores = KeyLimits(document_ends_BE, window), AttentionScores(scale, softcap)
    attend = attend_at_once if _has_kernel(q_BSND, softcap) else attend_in_turn
    out_BSND, lse_NT = attend(q_BSND, k_BSKD, v_BSKD, limits, scores)
    return out_BSND, lse_NT if sinks_N is None else _add_sinks(out_BSND, lse_NT, sinks_N)


@torch.library.custom_op("fourfold::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BSND: Tensor,
    lse_NT: Tensor,
    document_ends_BE: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, and v.

    Args:
        grad_BSND: the gradient of the outputs.
        q_BSND: the queries.
        k_BSKD: the keys.
        v_BSKD: the values.
        out_BSND: the outputs of ``attend_documents``.
        lse_NT: the log-sum-exps that ``attend_documents`` returned.
        document_ends_BE: as in ``attend_documents``.
        scale: as in ``attend_documents``.
        window: as in ``attend_documents``.
        softcap: as in ``attend_documents``.
    """
    limits, scores = KeyLimits(document_ends_BE, window), AttentionScores(scale, softcap)
    differentiate = differentiate_at_once if _has_kernel(q_BSND, softcap) else differentiate_in_turn
    dq, dk, dv = differentiate((grad_BSND, q_BSND, k_BSKD, v_BSKD, out_BSND), lse_NT, limits, scores)
    return dq, dk, dv


def _has_kernel(q: Tensor, softcap: float) -> bool:
    """Return whether one kernel call can handle all documents.

    The kernel needs half precision and a head dim of at most ``WIDEST_FLASH``, and it cannot soft-cap scores. We never
    use AMD's kernel, because it pads its log-sum-exps to [documents, N, S], which can take more memory than a mask.
    """
    is_half, fits = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1] <= WIDEST_FLASH
    return q.is_cuda and torch.version.hip is None and is_half and fits and not softcap


def attend_at_once(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, limits: KeyLimits, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Run attention for all documents in one call of a CUDA kernel."""
    length = q_BSND.shape[1]
    begins, tokens = begins_of(limits, q_BSND), [t.flatten(0, 1) for t in padded(q_BSND, k_BSKD, v_BSKD)]
    given = (*tokens, begins, begins, length, length, 0.0, True, False)
    out, lse = ATEN._flash_attention_forward(*given, **_options(limits, scores))[:2]
    return out[..., : q_BSND.shape[-1]].reshape(q_BSND.shape), lse


def differentiate_at_once(tensors: Tensors, lse_NT: Tensor, limits: KeyLimits, scores: AttentionScores) -> Tensors:
    """Return the gradients of q, k, and v, with one call of the kernel for all documents.

    Args:
        tensors: The output's gradient, q, k, v, and the output.
        lse_NT: The log-sum-exp of each query.
        limits: Which keys each query sees.
        scores: Scale and soft-cap of the scores.
    """
    batch, length = tensors[0].shape[:2]
    begins, tokens = begins_of(limits, tensors[0]), [t.flatten(0, 1) for t in padded(*tensors)]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=lse_NT.device), lse_NT.new_empty(0)
    given = (*tokens, lse_NT, begins, begins, length, length, 0.0, True, *no_dropout)
    gradients = ATEN._flash_attention_backward(*given, **_options(limits, scores))
    width = tensors[0].shape[-1]
    return tuple(gradient[..., :width].unflatten(0, (batch, length)).contiguous() for gradient in gradients)


def _options(limits: KeyLimits, scores: AttentionScores) -> dict[str, Any]:
    """Return the kernel's keyword arguments. The kernel does not count the query's own token as part of the window."""
    return {"scale": scores.scale} | ({"window_size_left": limits.window - 1} if limits.window else {})


def attend_in_turn(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, limits: KeyLimits, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Run attention for one piece of a document's queries at a time (``pieces_of``)."""
    out_BSND, lse_NT = _outputs(q_BSND)
    lse_BNS = _by_row(lse_NT, q_BSND)
    for row, queries, keys in pieces_of(limits, q_BSND, scores):
        q, k, v = (t.transpose(1, 2) for t in (q_BSND[row, queries], k_BSKD[row, keys], v_BSKD[row, keys]))
        mask = _mask_of_piece(queries, keys, limits.window, q.device)
        out, lse_BNS[row, :, queries] = attend_block(q, k, v, mask is None, mask, scores)
        out_BSND[row, queries] = out.transpose(1, 2)
    return out_BSND, lse_NT


def differentiate_in_turn(tensors: Tensors, lse_NT: Tensor, limits: KeyLimits, scores: AttentionScores) -> Tensors:
    """Return the gradients of q, k, and v, computed for one piece of a document's queries at a time (``pieces_of``).

    The arguments are as in ``differentiate_at_once``.
    """
    grad_BSND, q_BSND, k_BSKD, v_BSKD, out_BSND = tensors
    dq, dk, dv = (torch.zeros_like(t, dtype=lse_NT.dtype) for t in tensors[1:4])
    lse_BNS = _by_row(lse_NT, q_BSND)
    for row, queries, keys in pieces_of(limits, q_BSND, scores):
        grad, q, out = (t[row, queries].transpose(1, 2) for t in (grad_BSND, q_BSND, out_BSND))
        k, v = (t[row, keys].transpose(1, 2) for t in (k_BSKD, v_BSKD))
        mask = _mask_of_piece(queries, keys, limits.window, q.device)
        lse = lse_BNS[row, :, queries]
        parts = attend_block_backward(grad, q, out, lse, k, v, mask is None, mask, scores)
        for gradient, place, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            # Add, because several pieces may read the same key.
            gradient[row, place] += part.transpose(1, 2)
    return tuple(gradient.to(t.dtype) for gradient, t in zip((dq, dk, dv), tensors[1:4], strict=True))


def _add_sinks(out_BSND: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> Tensor:
    """Add the sinks to the softmax (``join_sinks``): scale the outputs in place, and return the new log-sum-exps."""
    share_NT, all_NT = join_sinks(lse_NT, sinks_N)
    out_BSND.mul_(_by_row(share_NT, out_BSND).transpose(1, 2)[..., None])
    return all_NT


def _by_row(lse_NT: Tensor, q_BSND: Tensor) -> Tensor:
    """View log-sum-exps [N, B·S] as [B, N, S]."""
    batch, length, heads, _ = q_BSND.shape
    return lse_NT.view(heads, batch, length).transpose(0, 1)


def begins_of(limits: KeyLimits, q_BSND: Tensor) -> Tensor:
    """Return the index of each document's first token, counted over the tokens of all sequences. The kernel needs
    int32.

    The last entry is the end of the last document. With E documents per sequence, the shape is [B·E + 1]. If each
    sequence is one document, it is [B + 1].
    """
    batch, length = q_BSND.shape[:2]
    row_begins_B1 = length * torch.arange(batch, device=q_BSND.device)[:, None]
    ends = length if limits.document_ends_BE is None else limits.document_ends_BE
    return F.pad((ends + row_begins_B1).flatten(), (1, 0)).int()


def pieces_of(limits: KeyLimits, q_BSND: Tensor, scores: AttentionScores) -> Iterator[tuple[slice, slice, slice]]:
    """Yield pieces of work. Each piece is three slices: sequences of the batch, some queries of one document, and the
    keys that at least one of these queries sees.

    The last query and the last key of a piece belong to the same token.
    """
    length, window = q_BSND.shape[1], limits.window
    size = length
    if scores.softcap or 0 < window < length:
        size = min(max(window or length, LEAST_QUERIES), MOST_QUERIES)
    whole = [(slice(None), slice(0, length))]
    for row, document in whole if limits.document_ends_BE is None else _documents(limits.document_ends_BE):
        for begin in range(document.start, document.stop, size):
            end = min(begin + size, document.stop)
            first = max(document.start, begin - window + 1) if window else document.start
            yield row, slice(begin, end), slice(first, end)


def _mask_of_piece(queries: slice, keys: slice, window: int, device: torch.device) -> Tensor | None:
    """Return a mask [1, 1, Q, S] that is true if a query sees a key. Return None if plain causal attention suffices."""
    count, before = queries.stop - queries.start, queries.start - keys.start
    if before == 0 and not 0 < window < count:
        return None
    seen_QS = torch.ones(count, before + count, dtype=torch.bool, device=device).tril(before)
    return (seen_QS.triu(before - window + 1) if window else seen_QS)[None, None]


def _documents(document_ends_BE: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield two slices for each document: its sequence in the batch, and its tokens."""
    for row, ends in enumerate(document_ends_BE.tolist()):
        begin = 0
        for end in ends:
            if end > begin:
                yield slice(row, row + 1), slice(begin, end)
            begin = end


def _outputs(q_BSND: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate memory for the outputs and the log-sum-exps."""
    batch, length, heads, _ = q_BSND.shape
    precise = torch.float64 if q_BSND.dtype == torch.float64 else torch.float32
    return q_BSND.new_empty(q_BSND.shape), q_BSND.new_empty((heads, batch * length), dtype=precise)


@attend_documents.register_fake
def _attend_documents(q: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@attend_documents_backward.register_fake
def _attend_documents_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensors:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ends, *options, sinks = inputs
    ctx.save_for_backward(q, k, v, *output, document_ends, sinks)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:  # The loss does not depend on the outputs.
        return (None,) * 8
    *kept, sinks = ctx.saved_tensors
    d_sinks = None
    if sinks is not None and ctx.needs_input_grad[7]:
        out_NTD = kept[3].flatten(0, 1).transpose(0, 1)
        d_sinks = sink_gradient(grad.flatten(0, 1).transpose(0, 1), out_NTD, kept[4], sinks)
    dq, dk, dv = attend_documents_backward(grad, *kept, *ctx.options)
    return dq, dk, dv, None, None, None, None, d_sinks


attend_documents.register_autograd(_differentiate, setup_context=_keep)
