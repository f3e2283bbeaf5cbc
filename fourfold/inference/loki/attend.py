"""Run one decoding step: rank the cached keys by their codes, gather the best keys, and attend to them exactly.

Shape letters: B sequences, N query heads, K KV heads, G = N / K, S keys, D head_dim, d leading components, C bytes of
codes, k chosen keys.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fourfold.inference.loki.codes import Encoder, decoded
from fourfold.inference.loki.select import DecodeStep, choose_keys, combine_heads
from fourfold.inference.loki.settings import LokiConfig

GATHER_BYTES = 1 << 21
"""Number of bytes of keys that a CPU gathers at a time, about the size of an L2 cache. The keys of one head are always
gathered together, even if they take more."""


def decode(
    query_BND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    code_BKSC: Tensor,
    encoder: Encoder,
    k: int,
    config: LokiConfig,
    scaling: float,
    visible_B1S: Tensor | None = None,
    k_B: Tensor | None = None,
) -> Tensor:
    """Return the output of attention from one token to the best k of its cached keys, [B, N, D] (arXiv 2406.02542,
    algorithm 1).

    The rows of each head must be contiguous in the caches. A sequence that sees no key gets zeros.

    Args:
        query_BND: Queries of one token.
        key_BKSD: Cached keys.
        value_BKSD: Cached values.
        code_BKSC: The codes of the keys, as ``encoder.encode`` returns them. Keys are ranked by these codes.
        encoder: The layer's encoder.
        k: Number of keys to attend to.
        config: Loki's settings.
        scaling: Factor on the scores.
        visible_B1S: True for keys that a sequence may see. None if it may see all keys.
        k_B: Number of keys that each sequence attends to, at most k. None if all sequences attend to k keys.
    """
    query_BKGD = query_BND.unflatten(1, (key_BKSD.shape[1], -1))
    query_BKGd = (encoder.project_queries(query_BKGD) * scaling).to(key_BKSD.dtype)
    step = DecodeStep(query_BKGD, query_BKGd, key_BKSD, value_BKSD, code_BKSC, k, config, scaling, visible_B1S, k_B)
    if not torch.is_grad_enabled():  # The compiled kernels have no backward pass, so use them only without gradients.
        kernels = config.kernels_for(key_BKSD.device, key_BKSD.dtype, value_BKSD.dtype)
        if kernels != "torch":
            with torch.cuda.device_of(query_BND):  # Triton launches kernels on the current device.
                return _compiled(step, kernels).flatten(1, 2)
    code_BKSd = decoded(code_BKSC, query_BKGd.dtype)
    worth_BKS = combine_heads(torch.matmul(query_BKGd, code_BKSd.transpose(-1, -2)), visible_B1S)
    return attend_to_chosen(step, choose_keys(worth_BKS, k, config, visible_B1S, k_B)).flatten(1, 2)


def _compiled(step: DecodeStep, package: Literal["triton", "numba"]) -> Tensor:
    """Run the step with the kernels of a package. Import the package only now, because it may not be installed."""
    if package == "triton":
        from fourfold.inference.loki import triton_kernels

        return triton_kernels.decode(step)
    from fourfold.inference.loki import numba_kernels

    return numba_kernels.decode(step)


def attend_to_chosen(step: DecodeStep, chosen_BKk: Tensor) -> Tensor:
    """Attend exactly to the chosen keys. With ``k_B``, use only the first k_B chosen keys of each sequence. Return
    [B, K, G, D]."""
    dtype = step.query_BKGD.dtype
    seen_BK1k = None
    if step.visible_B1S is not None:
        seen_BK1k = step.visible_B1S.expand(-1, chosen_BKk.shape[1], -1).gather(-1, chosen_BKk)[:, :, None]
        if step.k_B is not None:
            places_k = torch.arange(chosen_BKk.shape[-1], device=chosen_BKk.device)
            seen_BK1k &= places_k < step.k_B[:, None, None, None]
    exact = torch.promote_types(dtype, torch.float32)
    query_BKGD = step.query_BKGD.to(exact) * step.scaling
    out = []
    for heads in _head_slices(step.key_BKSD, chosen_BKk, exact):
        key_BhkD = gather_rows(step.key_BKSD[:, heads], chosen_BKk[:, heads]).to(exact)
        scores_BhGk = torch.matmul(query_BKGD[:, heads], key_BhkD.transpose(-1, -2))
        del key_BhkD  # Free the keys before gathering the values.
        value_BhkD = gather_rows(step.value_BKSD[:, heads], chosen_BKk[:, heads]).to(exact)
        seen_Bh1k = None if seen_BK1k is None else seen_BK1k[:, heads]
        out.append(torch.matmul(_weights_of(scores_BhGk, seen_Bh1k), value_BhkD))
    return torch.cat(out, 1).to(dtype)


def _head_slices(x_BKSD: Tensor, chosen_BKk: Tensor, dtype: torch.dtype) -> list[slice]:
    """Divide the KV heads into slices. On a CPU, the keys that a slice gathers in ``dtype`` fit into the L2 cache
    (``GATHER_BYTES``)."""
    batch, heads, _, width = x_BKSD.shape
    if x_BKSD.device.type != "cpu":
        return [slice(0, heads)]
    few = max(1, GATHER_BYTES // max(1, batch * chosen_BKk.shape[-1] * width * dtype.itemsize))
    return [slice(first, first + few) for first in range(0, heads, few)]


def _weights_of(scores_BhGk: Tensor, seen_Bh1k: Tensor | None) -> Tensor:
    """Return the softmax over the visible keys. If a sequence sees no key, its weights are zeros without a gradient."""
    if seen_Bh1k is None:
        return torch.softmax(scores_BhGk, -1)
    weights_BhGk = torch.softmax(scores_BhGk.masked_fill(~seen_Bh1k, torch.finfo(scores_BhGk.dtype).min), -1)
    return weights_BhGk.masked_fill(~seen_Bh1k, 0.0)


def gather_rows(x_BKSD: Tensor, chosen_BKk: Tensor) -> Tensor:
    """Return the chosen rows of a cache, [B, K, k, D]. The cache may have unused memory after the rows of each head."""
    batch, heads, length, width = x_BKSD.shape
    of_batch, of_head, of_row, _ = x_BKSD.stride()
    assert of_row == width and x_BKSD.stride(3) == 1, "the rows of a head must be contiguous"
    spanned = ((batch - 1) * of_batch + (heads - 1) * of_head) // width + length
    rows = x_BKSD.as_strided((spanned, width), (width, 1))
    first_BK = torch.arange(batch, device=x_BKSD.device)[:, None] * (of_batch // width) + (
        torch.arange(heads, device=x_BKSD.device) * (of_head // width)
    )
    return rows.index_select(0, (chosen_BKk + first_BK[..., None]).flatten()).view(batch, heads, -1, width)
