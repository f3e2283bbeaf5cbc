"""Run one decoding step: rank the cached keys by their codes, gather the best keys, and attend to them exactly. All
other keys (the rest) together count as one key, whose value is the mean of the values of the rest. The code of a key
holds the key's leading components in 2 bits each (``codes.py``).

Shape letters: B sequences, N query heads, K KV heads, G = N / K, S keys, D head_dim, d leading components, C bytes of
codes, k chosen keys.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fourfold.inference.loki.codes import Encoder, scores_of_codes
from fourfold.inference.loki.rest import share_of_chosen
from fourfold.inference.loki.select import DecodeStep, choose_keys, combine_heads
from fourfold.inference.loki.settings import LokiConfig


def decode(
    query_BND: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    value_sum_BKD: Tensor,
    code_BKSC: Tensor,
    encoder: Encoder,
    k: int,
    config: LokiConfig,
    scaling: float,
    visible_B1S: Tensor | None = None,
    k_B: Tensor | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend from one token of each sequence to the best k of the cached keys, and to the mean of all other keys (the
    rest). Return the output, [B, N, D]. The output is zero for a sequence that sees no key.

    Algorithm 1 of arXiv 2406.02542 does the same, but without the rest.

    Args:
        query_BND: Queries of one token of each sequence.
        key_BKSD: Cached keys.
        value_BKSD: Cached values.
        value_sum_BKD: Sum of the values that each sequence sees, in float32 or wider.
        code_BKSC: The codes of the keys, as ``encoder.encode`` returns them. Keys are ranked by these codes.
        encoder: The layer's encoder, which has computed the codes.
        k: Number of keys to attend to, without the rest.
        config: Loki's settings.
        scaling: Factor that the products of queries and keys are multiplied by.
        visible_B1S: True for keys that a sequence may see. None if every sequence may see all keys.
        k_B: Number of keys that each sequence attends to, at most k. None if all sequences attend to k keys.
        sinks_N: The sink of each query head, if the model has sinks (GPT-OSS). A sink is one more score in the softmax,
            without a value.
    """
    query_BKGD = query_BND.unflatten(1, (key_BKSD.shape[1], -1))
    query_BKGd = (encoder.project_queries(query_BKGD) * scaling).to(key_BKSD.dtype)
    step = DecodeStep(
        query_BKGD, query_BKGd, key_BKSD, value_BKSD, value_sum_BKD, code_BKSC, k, config, scaling, visible_B1S, k_B
    )
    kernels: Literal["torch", "triton", "numba"] = "torch"
    if not torch.is_grad_enabled():  # The compiled kernels have no backward pass.
        kernels = config.kernels_for(key_BKSD.device, key_BKSD.dtype, value_BKSD.dtype)
    if kernels != "torch":
        with torch.cuda.device_of(query_BND):  # Triton launches kernels on the current device.
            out_BKGD, lse_BKG = _compiled(step, kernels)
    else:
        coded_BKGS = scores_of_codes(query_BKGd, code_BKSC)
        chosen_BKk = choose_keys(combine_heads(coded_BKGS, visible_B1S), k, config, visible_B1S, k_B)
        out_BKGD, lse_BKG = attend_to_chosen(step, chosen_BKk, coded_BKGS)
    if sinks_N is not None:
        out_BKGD = out_BKGD * torch.sigmoid(lse_BKG - sinks_N.view(lse_BKG.shape[1:]))[..., None].to(out_BKGD.dtype)
    return out_BKGD.flatten(1, 2)


def _compiled(step: DecodeStep, package: Literal["triton", "numba"]) -> tuple[Tensor, Tensor]:
    """Run the step with kernels in Triton or Numba. Import the package only now, because it may not be installed."""
    if package == "triton":
        from fourfold.inference.loki import triton_kernels

        return triton_kernels.decode(step)
    from fourfold.inference.loki import numba_kernels

    return numba_kernels.decode(step)


def attend_to_chosen(step: DecodeStep, chosen_BKk: Tensor, coded_BKGS: Tensor) -> tuple[Tensor, Tensor]:
    """Attend exactly to the chosen keys, and to the mean of all other keys. Return the output, [B, K, G, D], and the
    log-sum-exps of the scores, [B, K, G].

    If ``step.k_B`` is set, a sequence attends only to its first k_B chosen keys.

    Args:
        step: The queries, the cache, and the settings of the step.
        chosen_BKk: Positions of the chosen keys.
        coded_BKGS: The scores of all keys, computed from the keys' codes.
    """
    dtype, exact = step.query_BKGD.dtype, step.value_sum_BKD.dtype
    is_chosen_BKk = torch.ones_like(chosen_BKk, dtype=torch.bool)
    is_rest_BKS = torch.ones_like(coded_BKGS[:, :, 0], dtype=torch.bool)
    if step.visible_B1S is not None:
        is_rest_BKS = step.visible_B1S.expand_as(is_rest_BKS)
        is_chosen_BKk = is_rest_BKS.gather(-1, chosen_BKk)
        if step.k_B is not None:
            is_chosen_BKk &= torch.arange(chosen_BKk.shape[-1], device=chosen_BKk.device) < step.k_B[:, None, None]
    is_rest_BKS = is_rest_BKS.scatter(-1, chosen_BKk, is_rest_BKS.gather(-1, chosen_BKk) & ~is_chosen_BKk)
    batch, heads = (torch.arange(size, device=chosen_BKk.device) for size in chosen_BKk.shape[:2])
    places = batch[:, None, None], heads[:, None], chosen_BKk
    key_BKkD, value_BKkD = step.key_BKSD[places].to(exact), step.value_BKSD[places].to(exact)
    scores_BKGk = torch.matmul(step.query_BKGD.to(exact) * step.scaling, key_BKkD.transpose(-1, -2))
    is_chosen_BK1k = is_chosen_BKk[:, :, None]
    coded_BKGk = coded_BKGS.gather(-1, chosen_BKk[:, :, None].expand_as(scores_BKGk))
    share_BKG1, lse_BKG1 = share_of_chosen(scores_BKGk, coded_BKGk, is_chosen_BK1k, coded_BKGS, is_rest_BKS[:, :, None])
    # If a sequence sees no key, its weights are zeros without a gradient.
    weights_BKGk = torch.softmax(scores_BKGk.masked_fill(~is_chosen_BK1k, torch.finfo(exact).min), -1)
    weights_BKGk = weights_BKGk.masked_fill(~is_chosen_BK1k, 0.0)
    value_BKkD = value_BKkD.masked_fill(~is_chosen_BKk[..., None], 0.0)
    rest_BKD = (step.value_sum_BKD - value_BKkD.sum(2)) / is_rest_BKS.sum(-1, keepdim=True).clamp(min=1)
    out_BKGD = share_BKG1 * torch.matmul(weights_BKGk, value_BKkD) + (1 - share_BKG1) * rest_BKD[:, :, None]
    return out_BKGD.to(dtype), lse_BKG1.squeeze(-1)
