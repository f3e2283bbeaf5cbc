"""Causal attention inside each document of packed sequences, without a mask: memory is that of attention without
documents, and time follows their lengths.

One kernel call for all documents where a GPU has one (FlashAttention 2, Dao 2023, arXiv 2307.08691), else one for each.
Both are operators that the compiler does not look into.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.parallel.block_attention import ATEN, attend_block, attend_block_backward

Tensors = tuple[Tensor, ...]


@torch.library.custom_op("fourfold::attend_documents", mutates_args=())
def attend_documents(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, document_ends_BE: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, S, N, D], and log-sum-exps [N, B·S] for the backward.

    document_ends_BE: where each document of a sequence ends, rising; the last is S, repeated in rows with fewer.
    """
    attend = attend_at_once if _has_kernel(q_BSND) else _attend_in_turn
    return attend(q_BSND, k_BSKD, v_BSKD, document_ends_BE)


@torch.library.custom_op("fourfold::attend_documents_backward", mutates_args=())
def attend_documents_backward(
    grad_BSND: Tensor,
    q_BSND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BSND: Tensor,
    lse_NT: Tensor,
    document_ends_BE: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    differentiate = differentiate_at_once if _has_kernel(q_BSND) else _differentiate_in_turn
    dq, dk, dv = differentiate((grad_BSND, q_BSND, k_BSKD, v_BSKD, out_BSND), lse_NT, document_ends_BE)
    return dq, dk, dv


def _has_kernel(q: Tensor) -> bool:
    """The kernel for all documents at once takes half precision.

    On AMD its log-sum-exps are padded to [documents, N, S], which can be more than a mask.
    """
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and torch.version.hip is None and is_half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def attend_at_once(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, document_ends_BE: Tensor) -> tuple[Tensor, Tensor]:
    """All documents in one call of a CUDA kernel."""
    length = q_BSND.shape[1]
    begins, tokens = begins_of(document_ends_BE, length), [t.flatten(0, 1) for t in (q_BSND, k_BSKD, v_BSKD)]
    out, lse = ATEN._flash_attention_forward(*tokens, begins, begins, length, length, 0.0, True, False)[:2]
    return out.reshape(q_BSND.shape), lse


def differentiate_at_once(tensors: Tensors, lse_NT: Tensor, document_ends_BE: Tensor) -> Tensors:
    """tensors: the output's gradient, q, k, v and the output."""
    batch, length = tensors[0].shape[:2]
    begins, tokens = begins_of(document_ends_BE, length), [t.flatten(0, 1) for t in tensors]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=lse_NT.device), lse_NT.new_empty(0)
    gradients = ATEN._flash_attention_backward(*tokens, lse_NT, begins, begins, length, length, 0.0, True, *no_dropout)
    return tuple(gradient.unflatten(0, (batch, length)) for gradient in gradients)


def _attend_in_turn(q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, document_ends_BE: Tensor) -> tuple[Tensor, Tensor]:
    out_BSND, lse_NT = _outputs(q_BSND)
    lse_BNS = _by_row(lse_NT, q_BSND)
    for row, tokens in _documents(document_ends_BE):
        q, k, v = (t[row, tokens].transpose(1, 2) for t in (q_BSND, k_BSKD, v_BSKD))
        out, lse_BNS[row, :, tokens] = attend_block(q, k, v, causal=True, mask_B1QS=None)
        out_BSND[row, tokens] = out.transpose(1, 2)
    return out_BSND, lse_NT


def _differentiate_in_turn(tensors: Tensors, lse_NT: Tensor, document_ends_BE: Tensor) -> Tensors:
    gradients = [t.new_empty(t.shape) for t in tensors[1:4]]
    lse_BNS = _by_row(lse_NT, tensors[1])
    for row, tokens in _documents(document_ends_BE):
        grad, q, k, v, out = (t[row, tokens].transpose(1, 2) for t in tensors)
        parts = attend_block_backward(grad, q, out, lse_BNS[row, :, tokens], k, v, causal=True, mask_B1QS=None)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient[row, tokens] = part.transpose(1, 2)
    return tuple(gradients)


def _by_row(lse_NT: Tensor, q_BSND: Tensor) -> Tensor:
    """[N, B·S] as [B, N, S], in place."""
    batch, length, heads, _ = q_BSND.shape
    return lse_NT.view(heads, batch, length).transpose(0, 1)


def begins_of(document_ends_BE: Tensor, length: int) -> Tensor:
    """Where the documents begin in all tokens of the batch, and the end of the last, int32 [B·E + 1]."""
    row_begins_B1 = length * torch.arange(len(document_ends_BE), device=document_ends_BE.device)[:, None]
    return F.pad((document_ends_BE + row_begins_B1).flatten(), (1, 0)).int()


def _documents(document_ends_BE: Tensor) -> Iterator[tuple[slice, slice]]:
    """The row and the tokens of each document."""
    for row, ends in enumerate(document_ends_BE.tolist()):
        begin = 0
        for end in ends:
            if end > begin:
                yield slice(row, row + 1), slice(begin, end)
            begin = end


def _outputs(q_BSND: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the outputs and the log-sum-exps."""
    batch, length, heads, _ = q_BSND.shape
    precise = torch.float64 if q_BSND.dtype == torch.float64 else torch.float32
    return q_BSND.new_empty(q_BSND.shape), q_BSND.new_empty((heads, batch * length), dtype=precise)


@attend_documents.register_fake
def _attend_documents(q: Tensor, k: Tensor, v: Tensor, document_ends: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@attend_documents_backward.register_fake
def _attend_documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, document_ends: Tensor
) -> Tensors:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ends = inputs
    ctx.save_for_backward(q, k, v, *output, document_ends)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing reads the outputs
        return None, None, None, None
    dq, dk, dv = attend_documents_backward(grad, *ctx.saved_tensors)
    return dq, dk, dv, None


attend_documents.register_autograd(_differentiate, setup_context=_keep)
