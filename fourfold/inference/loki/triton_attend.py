"""Attend to the chosen keys and to the mean of all other keys (the rest) with Triton kernels. The chosen keys are split
into parts, and the outputs of the parts are merged.

Shape letters as in triton_kernels.py. Q is the number of parts of a row's chosen keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fourfold.inference.loki.select import DecodeStep

CHOSEN_SPLIT, CHOSEN_BLOCK = 128, 64
"""Limits for attending to the chosen keys: keys per program, and largest number of keys per iteration. Both are small,
because chosen rows are scattered in memory."""

MERGED_BLOCK = 16
"""Number of partial outputs of one query head to merge per iteration. A fixed number keeps register use constant,
however long the context is."""

TILE_BYTES = 8192
"""Largest number of bytes of keys per iteration. Several iterations are in flight at the same time, and must fit into
the shared memory of the smallest GPUs."""

NEVER = tl.constexpr(float("-inf"))


def attend(
    step: DecodeStep, chosen_Rk: Tensor, scores_RGS: Tensor, maxima_RPG: Tensor, rest_RPG: Tensor, k_of_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of a decoding step, [B, K, G, D], and the log-sum-exps of the step's scores, [B, K, G].

    Args:
        step: The queries, the cache, and the settings of the step.
        chosen_Rk: Positions of the chosen keys, and −1 for no key.
        scores_RGS: The scores of the codes, and −inf for invisible keys.
        maxima_RPG: For each split of a row's keys, the largest score of the codes.
        rest_RPG: For each split, Σ exp(score − largest score of the row) of the keys that are not chosen.
        k_of_B: Number of keys that each sequence attends to.
    """
    query_BKGD, key_BKSD, value_BKSD, visible_BS = step.query_BKGD, step.key_BKSD, step.value_BKSD, step.visible_BS
    (_, heads, group, width), device = query_BKGD.shape, query_BKGD.device
    (rows, k), length, splits = chosen_Rk.shape, key_BKSD.shape[2], maxima_RPG.shape[1]
    parts = triton.cdiv(k, CHOSEN_SPLIT)
    partial_RQGD = torch.empty(rows, parts, group + 1, width, dtype=torch.float32, device=device)
    exact_3RQG = torch.empty(3, rows, parts, group, dtype=torch.float32, device=device)
    sizes = {"G": group, "GP": max(16, triton.next_power_of_2(group + 1))}
    wide = {"D": width, "DP": max(16, triton.next_power_of_2(width))}
    _attend[rows, parts](
        query_BKGD.contiguous(), key_BKSD, value_BKSD, chosen_Rk, visible_BS, scores_RGS, partial_RQGD, *exact_3RQG,
        step.scaling, heads, length, k, parts, *key_BKSD.stride()[:3], *value_BKSD.stride()[:3],
        **sizes, **wide, MASKED=visible_BS is not None, SPLIT=CHOSEN_SPLIT,
        BLOCK=block_of(wide["DP"], key_BKSD, CHOSEN_BLOCK),
    )  # fmt: skip
    out_BKGD = torch.empty_like(query_BKGD, memory_format=torch.contiguous_format)
    lse_BKG = torch.empty(query_BKGD.shape[:3], dtype=torch.float32, device=device)
    seen_B = step.seen_B.to(torch.int32)
    _merge[rows, group](
        partial_RQGD, *exact_3RQG, maxima_RPG, rest_RPG, step.value_sum_BKD.float().contiguous(), k_of_B, seen_B,
        out_BKGD, lse_BKG, heads, parts, splits, G=group, BLOCK=MERGED_BLOCK, PP=triton.next_power_of_2(splits), **wide,
    )  # fmt: skip
    return out_BKGD, lse_BKG


def block_of(width: int, keys: Tensor, most: int) -> int:
    """Return the number of keys to process per iteration, from 16 to ``most``. ``width`` is the number of dims of a
    key, rounded up to a power of two."""
    return max(16, min(most, TILE_BYTES // (width * keys.element_size())))


@triton.jit(do_not_specialize=["k", "parts"])
def _attend(
    query, key, value, chosen, visible, scores, partial, maxima, sums, differences, scaling, heads, length, k, parts,
    key_of_batch, key_of_head, key_of_row, value_of_batch, value_of_head, value_of_row,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend to a part of the chosen keys, without dividing by the sum of the weights. Also sum the differences between
    the exact scores of these keys and the scores of their codes.

    An additional head sums the values: its scores are all 0, so all its weights are 1."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GP), tl.arange(0, DP)
    keys = key + (row // heads) * key_of_batch + (row % heads) * key_of_head
    values = value + (row // heads) * value_of_batch + (row % heads) * value_of_head
    query_GPDP = tl.load(query + (row * G + g[:, None]) * D + c[None, :], (g[:, None] < G) & (c[None, :] < D), 0.0)
    largest_GP, total_GP = tl.full([GP], NEVER, tl.float32), tl.zeros([GP], tl.float32)
    out_GPDP, difference_GP = tl.zeros([GP, DP], tl.float32), tl.zeros([GP], tl.float32)
    for begin in range(part * SPLIT, tl.minimum((part + 1) * SPLIT, k), BLOCK):
        n = begin + tl.arange(0, BLOCK)
        s = tl.load(chosen + row * k + n, n < k, -1).to(tl.int64)
        seen_n = s >= 0
        if MASKED:
            seen_n &= tl.load(visible + (row // heads) * length + s, seen_n, 0) != 0
        there_nDP = (s[:, None] >= 0) & (c[None, :] < D)
        key_nDP = tl.load(keys + s[:, None] * key_of_row + c[None, :], there_nDP, 0.0)
        value_nDP = tl.load(values + s[:, None] * value_of_row + c[None, :], there_nDP, 0.0)
        scores_GPn = tl.dot(query_GPDP, tl.trans(key_nDP), input_precision="ieee") * scaling
        is_there_GPn = (g[:, None] < G) & seen_n[None, :]
        coded_GPn = tl.load(scores + (row * G + g[:, None]) * length + s[None, :], is_there_GPn, 0.0)
        difference_GP += tl.sum(tl.where(is_there_GPn, scores_GPn - coded_GPn, 0.0), 1)
        scores_GPn = tl.where(seen_n[None, :], tl.where(g[:, None] == G, 0.0, scores_GPn), NEVER)
        larger_GP = tl.maximum(largest_GP, tl.max(scores_GPn, 1))
        safe_GP = tl.where(larger_GP == NEVER, 0.0, larger_GP)
        shrink_GP = tl.exp(largest_GP - safe_GP)
        weights_GPn = tl.exp(scores_GPn - safe_GP[:, None])
        total_GP = total_GP * shrink_GP + tl.sum(weights_GPn, 1)
        products_GPDP = tl.dot(weights_GPn.to(value_nDP.dtype), value_nDP, input_precision="ieee")
        out_GPDP = out_GPDP * shrink_GP[:, None] + products_GPDP
        largest_GP = larger_GP
    place = row * parts + part
    partials = partial + place * (G + 1) * D
    tl.store(partials + g[:, None] * D + c[None, :], out_GPDP, (g[:, None] <= G) & (c[None, :] < D))
    tl.store(maxima + place * G + g, largest_GP, g < G)
    tl.store(sums + place * G + g, total_GP, g < G)
    tl.store(differences + place * G + g, difference_GP, g < G)


@triton.jit(do_not_specialize=["parts", "splits"])
def _merge(
    partial, maxima, sums, differences, coded_maxima, rest, value_sum, ks, seen, out, lse, heads, parts, splits,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query head, ``BLOCK`` parts at a time, and add the mean of the keys that are not
    chosen, as ``rest.py`` explains. The output of a head that sees no keys is zero."""
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, DP)
    largest, total, difference = tl.full([], NEVER, tl.float32), tl.full([], 0.0, tl.float32), 0.0
    out_DP, sum_DP = tl.zeros([DP], tl.float32), tl.zeros([DP], tl.float32)
    for begin in range(0, parts, BLOCK):
        p = begin + tl.arange(0, BLOCK)
        places_p = (row * parts + p) * G + g
        maxima_p = tl.load(maxima + places_p, p < parts, NEVER)
        larger = tl.maximum(largest, tl.max(maxima_p, 0))
        safe = tl.where(larger == NEVER, 0.0, larger)  # Before the first visible key, −inf − (−inf) is NaN.
        shrink, weights_p = tl.exp(largest - safe), tl.exp(maxima_p - safe)
        total = total * shrink + tl.sum(tl.load(sums + places_p, p < parts, 0.0) * weights_p, 0)
        difference += tl.sum(tl.load(differences + places_p, p < parts, 0.0), 0)
        there_pDP = (p[:, None] < parts) & (c[None, :] < D)
        of_parts_pDP = partial + (row * parts + p[:, None]) * (G + 1) * D + c[None, :]
        out_DP = out_DP * shrink + tl.sum(tl.load(of_parts_pDP + g * D, there_pDP, 0.0) * weights_p[:, None], 0)
        sum_DP += tl.sum(tl.load(of_parts_pDP + G * D, there_pDP, 0.0), 0)
        largest = larger
    out_DP = out_DP / tl.where(total > 0, total, 1.0)

    p = tl.arange(0, PP)
    places_p = (row * splits + p) * G + g
    coded = tl.max(tl.load(coded_maxima + places_p, p < splits, NEVER), 0)
    of_rest = tl.sum(tl.load(rest + places_p, p < splits, 0.0), 0)
    seen_keys = tl.load(seen + row // heads)
    count = tl.minimum(tl.load(ks + row // heads), seen_keys)
    if count < seen_keys:
        of_rest *= tl.exp(difference / count + coded - largest)
        mean_DP = (tl.load(value_sum + row * D + c, c < D, 0.0) - sum_DP) / (seen_keys - count)
        total += of_rest
        out_DP += of_rest / total * (mean_DP - out_DP)
    tl.store(lse + row * G + g, tl.where(total > 0, largest + tl.log(tl.where(total > 0, total, 1.0)), NEVER))
    tl.store(out + (row * G + g) * D + c, out_DP.to(out.dtype.element_ty), c < D)
