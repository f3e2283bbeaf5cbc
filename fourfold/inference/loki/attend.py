"""One decoding step: rank the cached keys, gather the best, attend to these exactly.

Letters of shapes: B sequences, N query heads, K KV heads, G = N / K, S keys, D head_dim, d leading dims, k chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.inference.loki.config import LokiConfig
from fourfold.inference.loki.select import NEVER, agree, choose

LONG = 1 << 16
"""Scores or gathered numbers of one KV head from which on a CPU takes the heads one by one."""


def decode(
    query_BND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    proxy_BKSd: Tensor,
    basis_KDd: Tensor | None,
    k: int,
    config: LokiConfig,
    scaling: float,
    visible_B1S: Tensor | None = None,
    k_B: Tensor | None = None,
) -> Tensor:
    """Attention of one token to the best k of its cached keys, [B, N, D] (Loki, arXiv 2406.02542, algorithm 1).

    k_B: how many of the k each sequence may attend to, where that differs.

    The query head j uses the KV head j // G. basis_KDd: None where queries and keys are rotated already, so that the
    leading dims are those that rank. A sequence that sees no key at all gets zeros.
    """
    query_BKGD = query_BND.unflatten(1, (key_BKSD.shape[1], -1))
    length, d = proxy_BKSd.shape[2:]
    query_BKGd = query_BKGD[..., :d] if basis_KDd is None else project(query_BKGD, basis_KDd)
    query_BKGd = (query_BKGd * scaling).to(proxy_BKSd.dtype)
    if not torch.is_grad_enabled():  # autograd knows neither our kernels nor products that are written into a buffer
        step = None
        if config.uses_triton(query_BND.device):
            from fourfold.inference.loki.kernels import decode as step
        elif query_BND.device.type == "cpu" and max(length * query_BKGD.shape[2], k * query_BKGD.shape[3]) >= LONG:
            step = _head_by_head
        if step is not None:
            cached = (key_BKSD, value_BKSD, proxy_BKSd)
            return step(query_BKGD, query_BKGd, *cached, k, config, scaling, visible_B1S, k_B).flatten(1, 2)
    worth_BKS = agree(torch.matmul(query_BKGd, proxy_BKSd.transpose(-1, -2)), config.group_reduce, visible_B1S)
    chosen_BKk = choose(worth_BKS, k, config, visible_B1S, k_B)
    return attend_to(query_BKGD, key_BKSD, value_BKSD, chosen_BKk, scaling, visible_B1S, k_B).flatten(1, 2)


def _head_by_head(
    query_BKGD: Tensor,
    query_BKGd: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    proxy_BKSd: Tensor,
    k: int,
    config: LokiConfig,
    scaling: float,
    visible_B1S: Tensor | None,
    k_B: Tensor | None,
) -> Tensor:
    """The same; from the scores on one KV head after the other, so that gathered rows stay in a CPU's cache."""
    batch, heads, _, _ = query_BKGD.shape
    out_BKGD = torch.empty_like(query_BKGD)
    scores_BKGS = torch.matmul(query_BKGd, proxy_BKSd.transpose(-1, -2))
    for row in range(batch):
        visible_11S = None if visible_B1S is None else visible_B1S[row, None]
        k_of_row = k if k_B is None else max(1, int(k_B[row]))
        for head in range(heads):
            worth_11S = agree(scores_BKGS[row, head][None, None], config.group_reduce, visible_11S)
            chosen_k = choose(worth_11S, k_of_row, config, visible_11S).flatten()
            key_kD, value_kD = (cached[row, head].index_select(0, chosen_k) for cached in (key_BKSD, value_BKSD))
            exact_Gk = torch.matmul(query_BKGD[row, head] * scaling, key_kD.T).float()
            if visible_B1S is not None:
                exact_Gk.masked_fill_(~visible_B1S[row, 0, chosen_k], NEVER)
            weights_Gk = torch.softmax(exact_Gk, -1).to(value_kD.dtype)
            torch.matmul(weights_Gk, value_kD, out=out_BKGD[row, head])
    return out_BKGD if visible_B1S is None else out_BKGD.masked_fill(~visible_B1S.any(-1)[..., None, None], 0.0)


def project(x_BKSD: Tensor, basis_KDd: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rotated dims, [B, K, S, d]; the products are summed in float32 and rounded once, to ``dtype`` or x's."""
    return torch.matmul(x_BKSD.float(), basis_KDd).to(dtype or x_BKSD.dtype)


def attend_to(
    query_BKGD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    chosen_BKk: Tensor,
    scaling: float,
    visible_B1S: Tensor | None = None,
    k_B: Tensor | None = None,
) -> Tensor:
    """Exact attention to the chosen keys, of each sequence the first k_B, [B, K, G, D]."""
    key_BKkD, value_BKkD = gather(key_BKSD, chosen_BKk), gather(value_BKSD, chosen_BKk)
    seen_BK1k = None
    if visible_B1S is not None:
        seen_BK1k = visible_B1S.expand(-1, chosen_BKk.shape[1], -1).gather(-1, chosen_BKk)[:, :, None]
        if k_B is not None:
            seen_BK1k &= torch.arange(chosen_BKk.shape[-1], device=k_B.device) < k_B[:, None, None, None]
    out_BKGD = torch.nn.functional.scaled_dot_product_attention(
        query_BKGD, key_BKkD, value_BKkD, attn_mask=seen_BK1k, scale=scaling
    )
    return out_BKGD if seen_BK1k is None else out_BKGD.masked_fill(~seen_BK1k.any(-1, keepdim=True), 0.0)


def gather(x_BKSD: Tensor, chosen_BKk: Tensor) -> Tensor:
    """The rows at these places, [B, K, k, D], out of a cache that has room to grow behind each head's rows."""
    batch, heads, length, width = x_BKSD.shape
    of_batch, of_head, of_row, _ = x_BKSD.stride()
    assert of_row == width and x_BKSD.stride(3) == 1, "the rows of a head must follow each other"
    spanned = ((batch - 1) * of_batch + (heads - 1) * of_head) // width + length
    rows = x_BKSD.as_strided((spanned, width), (width, 1))
    first_BK = torch.arange(batch, device=x_BKSD.device)[:, None] * (of_batch // width) + (
        torch.arange(heads, device=x_BKSD.device) * (of_head // width)
    )
    return rows.index_select(0, (chosen_BKk + first_BK[..., None]).flatten()).view(batch, heads, -1, width)
