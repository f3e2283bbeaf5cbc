"""Run one decoding step: rank the cached keys by their codes, gather the best keys, and attend to them exactly.

Shape letters: B sequences, N query heads, K KV heads, G = N / K, S keys, D head_dim, d leading components, C bytes of
codes, k chosen keys.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fourfold.inference.loki.codes import Encoder, scores_of_codes
from fourfold.inference.loki.select import DecodeStep, choose_keys, combine_heads
from fourfold.inference.loki.settings import LokiConfig


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

    A sequence that sees no key gets zeros.

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
    worth_BKS = combine_heads(scores_of_codes(query_BKGd, code_BKSC), visible_B1S)
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
    batch, heads = (torch.arange(size, device=chosen_BKk.device) for size in chosen_BKk.shape[:2])
    places = batch[:, None, None], heads[:, None], chosen_BKk
    key_BKkD, value_BKkD = step.key_BKSD[places].to(exact), step.value_BKSD[places].to(exact)
    scores_BKGk = torch.matmul(step.query_BKGD.to(exact) * step.scaling, key_BKkD.transpose(-1, -2))
    if seen_BK1k is not None:
        scores_BKGk = scores_BKGk.masked_fill(~seen_BK1k, torch.finfo(exact).min)
    weights_BKGk = torch.softmax(scores_BKGk, -1)
    if seen_BK1k is not None:  # If a sequence sees no key, its weights are zeros without a gradient.
        weights_BKGk = weights_BKGk.masked_fill(~seen_BK1k, 0.0)
    return torch.matmul(weights_BKGk, value_BKkD).to(dtype)
