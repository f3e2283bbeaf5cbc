"""Run one decoding step with Triton kernels: score → rank → choose → attend. Each kernel is split over the sequence.

The best k keys are selected without sorting. Each key's combined score (see ``select.combine_heads``) becomes an
unsigned integer, so that integers have the same order as scores. A radix search finds the k-th largest integer with
three histograms: of the leading 11 bits, the next 11 bits, and the last 10 bits. One more pass writes the positions of
all keys that reach this integer, and takes the leftmost among ties.

Launch grids do not depend on the data, so a step can be captured in a CUDA graph.

Shape letters as in attend.py. R = B · K rows, P splits of a row. GP, DP, PP: G, D, P rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fourfold.inference.loki import codes
from fourfold.inference.loki.select import DecodeStep
from fourfold.inference.loki.triton_attend import NEVER, attend, block_of

PROGRAMS, LEAST_SPLIT, MOST_SPLIT, BLOCK = 512, 512, 4096, 256
"""Limits for a pass over all keys: the desired number of programs, the smallest and the largest number of keys per
program, and the largest number of keys per iteration."""

MOST_SPLITS = 256
"""Largest number of splits of a row. Each program holds the sums of all splits in registers, so longer rows get longer
splits."""

BINS = tl.constexpr(2048)
BITS, PER_BYTE = tl.constexpr(codes.BITS), tl.constexpr(codes.PER_BYTE)
LAST_CODE = tl.constexpr(codes.INTERVALS - 1)


def decode(step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Run a decoding step on the current GPU. Return the output, [B, K, G, D], and the log-sum-exps of the scores,
    [B, K, G]."""
    query_BKGD, key_BKSD, value_BKSD, code_BKSC = step.query_BKGD, step.key_BKSD, step.value_BKSD, step.code_BKSC
    batch, heads, group, _ = query_BKGD.shape
    length, size = code_BKSC.shape[2:]
    assert key_BKSD.stride(3) == value_BKSD.stride(3) == 1, "rows must be contiguous"
    rows, k, device = batch * heads, step.k, query_BKGD.device
    visible_BS, always_BS = step.visible_BS, step.always_BS
    # The search needs at least one key, so a sequence that sees no keys also gets k = 1. Attention masks this key
    # later.
    k_of_B = torch.full((batch,), k, device=device) if step.k_B is None else step.k_B.clamp(1, k)
    k_of_B = k_of_B.to(torch.int32)

    blocks = {"SPLIT": split_of(length, rows), "BLOCK": BLOCK}
    splits = triton.cdiv(length, blocks["SPLIT"])
    grid = (rows, splits)
    sizes = {"G": group, "GP": max(16, triton.next_power_of_2(group))}
    scores_RGS = torch.empty(rows, group, length, dtype=torch.float32, device=device)
    maxima_RPG, sums_RPG, rest_RPG = torch.empty(3, rows, splits, group, dtype=torch.float32, device=device)
    wide = {"C": size, "CP": max(16, triton.next_power_of_2(size))}
    _score[grid](
        step.query_BKGd.contiguous(), code_BKSC, visible_BS, scores_RGS, maxima_RPG, sums_RPG,
        heads, length, splits, *code_BKSC.stride()[:3],
        **sizes, **wide, **blocks | {"BLOCK": block_of(wide["CP"], key_BKSD, BLOCK)}, MASKED=visible_BS is not None,
    )  # fmt: skip

    ranks_RS = torch.empty(rows, length, dtype=torch.int32, device=device)
    histograms_3RN = torch.zeros(3, rows, BINS.value, dtype=torch.int32, device=device)
    _rank[grid](
        scores_RGS, maxima_RPG, sums_RPG, always_BS, ranks_RS, histograms_3RN, heads, length, splits,
        **sizes, PP=triton.next_power_of_2(splits), ENDS=always_BS is not None, **blocks,
    )  # fmt: skip
    counts_RP2 = torch.empty(rows, splits, 2, dtype=torch.int32, device=device)
    chosen_Rk = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    of_search = (ranks_RS, histograms_3RN, k_of_B, heads, length, rows)
    for level in (1, 2):
        _refine[grid](*of_search, LEVEL=level, **blocks)
    _count[grid](*of_search, counts_RP2, splits, **blocks)
    of_splits = {"PP": triton.next_power_of_2(splits)}
    _collect[grid](
        *of_search, counts_RP2, chosen_Rk, scores_RGS, maxima_RPG, rest_RPG, splits, k, **sizes, **of_splits, **blocks
    )

    return attend(step, chosen_Rk, scores_RGS, maxima_RPG, rest_RPG, k_of_B)


def split_of(length: int, rows: int) -> int:
    """Return the number of keys per program in a pass over all keys."""
    split = min(max(triton.cdiv(length * rows, PROGRAMS), LEAST_SPLIT), MOST_SPLIT)
    power: int = triton.next_power_of_2(max(split, triton.cdiv(length, MOST_SPLITS)))
    return power


@triton.jit(do_not_specialize=["splits"])
def _score(
    query, code, visible, scores, maxima, sums, heads, length, splits, of_batch, of_head, of_row,
    G: tl.constexpr, GP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, MASKED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a split's keys for each query head. Also compute the maximum of these scores, and
    Σ exp(score − maximum)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GP), tl.arange(0, CP)
    queries = query + (row * G + g[:, None]) * PER_BYTE * C + c[None, :]
    codes_of_row = code + (row // heads) * of_batch + (row % heads) * of_head
    largest_GP, total_GP = tl.full([GP], NEVER, tl.float32), tl.zeros([GP], tl.float32)
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        code_SCP = tl.load(codes_of_row + s[:, None] * of_row + c[None, :], (s[:, None] < length) & (c[None, :] < C), 0)
        scores_GPS = tl.zeros([GP, BLOCK], tl.float32)
        for place in tl.static_range(PER_BYTE):
            query_GPCP = tl.load(queries + place * C, (g[:, None] < G) & (c[None, :] < C), 0.0)
            key_SCP = ((code_SCP >> (place * BITS)) & LAST_CODE).to(query_GPCP.dtype)
            scores_GPS = tl.dot(query_GPCP, tl.trans(key_SCP), scores_GPS, input_precision="ieee")
        seen_S = s < length
        if MASKED:
            seen_S &= tl.load(visible + (row // heads) * length + s, seen_S, 0) != 0
        scores_GPS = tl.where(seen_S[None, :], scores_GPS, NEVER)
        tl.store(
            scores + (row * G + g[:, None]) * length + s[None, :], scores_GPS, (g[:, None] < G) & (s[None, :] < length)
        )
        larger_GP = tl.maximum(largest_GP, tl.max(scores_GPS, 1))
        safe_GP = tl.where(larger_GP == NEVER, 0.0, larger_GP)  # Before the first visible key, −inf − (−inf) is NaN.
        total_GP = total_GP * tl.exp(largest_GP - safe_GP) + tl.sum(tl.exp(scores_GPS - safe_GP[:, None]), 1)
        largest_GP = larger_GP
    tl.store(maxima + (row * splits + split) * G + g, largest_GP, g < G)
    tl.store(sums + (row * splits + split) * G + g, total_GP, g < G)


@triton.jit(do_not_specialize=["splits"])
def _rank(
    scores, maxima, sums, always, ranks, histograms, heads, length, splits,
    G: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr, ENDS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each key's rank: its combined score for the group as an unsigned integer, in the same order as the scores.
    Also write a histogram of the leading 11 bits of the ranks."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, p = tl.arange(0, GP), tl.arange(0, PP)
    maxima_PPGP = _of_splits(maxima, row, splits, p, g, NEVER, G)
    largest_GP = tl.max(maxima_PPGP, 0)
    safe_GP = tl.where(largest_GP == NEVER, 0.0, largest_GP)
    total_GP = tl.sum(_of_splits(sums, row, splits, p, g, 0.0, G) * tl.exp(maxima_PPGP - safe_GP[None, :]), 0)
    share_GP = 1.0 / tl.where(total_GP > 0, total_GP, 1.0)
    histogram_N = tl.zeros([BINS], tl.int32)
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        inside_GPS = (g[:, None] < G) & (s[None, :] < length)
        scores_GPS = tl.load(scores + (row * G + g[:, None]) * length + s[None, :], inside_GPS, NEVER)
        best_S = tl.max(scores_GPS, 0)
        if G == 1:  # The scores of a single query head need no normalization to rank keys.
            worth_S = tl.sum(tl.where(inside_GPS, scores_GPS, 0.0), 0)
        else:
            worth_S = tl.sum(tl.exp(scores_GPS - safe_GP[:, None]) * share_GP[:, None], 0)
        worth_S = tl.where(best_S == NEVER, NEVER, worth_S)
        if ENDS:
            kept_S = tl.load(always + (row // heads) * length + s, s < length, 0) != 0
            worth_S = tl.where(kept_S, float("inf"), worth_S)
        bits_S = worth_S.to(tl.uint32, bitcast=True)
        rank_S = tl.where((bits_S >> 31) != 0, bits_S ^ 0xFFFFFFFF, bits_S | 0x80000000)
        tl.store(ranks + row * length + s, rank_S.to(tl.int32, bitcast=True), s < length)
        histogram_N += _histogram(rank_S >> 21, s < length)
    _add(histograms + row * BINS, histogram_N)


@triton.jit
def _refine(
    ranks, histograms, ks, heads, length, rows, LEVEL: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """In levels 1 and 2, make a histogram of the next bits. The histogram counts only ranks whose leading bits equal
    the known leading bits of the k-th largest rank."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    known, _ = _search(histograms, ks, heads, rows, row, LEVEL)
    histogram_N = tl.zeros([BINS], tl.int32)
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        rank_S = tl.load(ranks + row * length + s, s < length, 0).to(tl.uint32, bitcast=True)
        if LEVEL == 1:
            histogram_N += _histogram((rank_S >> 10) & 2047, (s < length) & (rank_S >> 21 == known))
        else:
            histogram_N += _histogram(rank_S & 1023, (s < length) & (rank_S >> 10 == known))
    _add(histograms + (LEVEL * rows + row) * BINS, histogram_N)


@triton.jit(do_not_specialize=["splits"])
def _count(
    ranks, histograms, ks, heads, length, rows, counts, splits, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the keys in a split that rank above the k-th largest rank, and the keys that have exactly this rank."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kth, _ = _search(histograms, ks, heads, rows, row, 3)
    above, equal = 0, 0
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        rank_S = tl.load(ranks + row * length + s, s < length, 0).to(tl.uint32, bitcast=True)
        above += tl.sum(((rank_S > kth) & (s < length)).to(tl.int32), 0)
        equal += tl.sum(((rank_S == kth) & (s < length)).to(tl.int32), 0)
    tl.store(counts + (row * splits + split) * 2, above)
    tl.store(counts + (row * splits + split) * 2 + 1, equal)


@triton.jit(do_not_specialize=["splits", "k"])
def _collect(
    ranks, histograms, ks, heads, length, rows, counts, chosen, scores, maxima, rest, splits, k,
    G: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the positions of all keys that rank above the k-th largest rank. If more keys are needed, add keys with
    exactly this rank, from the left. For each query head, write Σ exp(score − maximum) over the split's keys that are
    not chosen."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kth, wanted = _search(histograms, ks, heads, rows, row, 3)
    p, g = tl.arange(0, PP), tl.arange(0, GP)
    largest_GP = tl.max(_of_splits(maxima, row, splits, p, g, NEVER, G), 0)
    safe_GP, rest_GP = tl.where(largest_GP == NEVER, 0.0, largest_GP), tl.zeros([GP], tl.float32)
    above = tl.sum(tl.load(counts + (row * splits + p) * 2, p < split, 0), 0)
    equal = tl.sum(tl.load(counts + (row * splits + p) * 2 + 1, p < split, 0), 0)
    for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
        s = begin + tl.arange(0, BLOCK)
        rank_S = tl.load(ranks + row * length + s, s < length, 0).to(tl.uint32, bitcast=True)
        above_S = ((rank_S > kth) & (s < length)).to(tl.int32)
        equal_S = ((rank_S == kth) & (s < length)).to(tl.int32)
        above_before_S = above + tl.cumsum(above_S, 0) - above_S
        equal_before_S = equal + tl.cumsum(equal_S, 0) - equal_S
        is_chosen_S = (above_S != 0) | ((equal_S != 0) & (equal_before_S < wanted))
        place_S = above_before_S + tl.minimum(equal_before_S, wanted)
        tl.store(chosen + row * k + place_S, s, is_chosen_S)
        above += tl.sum(above_S, 0)
        equal += tl.sum(equal_S, 0)
        is_rest_GPS = (g[:, None] < G) & ((s < length) & ~is_chosen_S)[None, :]
        scores_GPS = tl.load(scores + (row * G + g[:, None]) * length + s[None, :], is_rest_GPS, NEVER)
        rest_GP += tl.sum(tl.exp(scores_GPS - safe_GP[:, None]), 1)
    tl.store(rest + (row * splits + split) * G + g, rest_GP, g < G)


@triton.jit
def _of_splits(numbers, row, splits, p, g, missing, G: tl.constexpr):
    """Load a number of each split and each query head of a row. Padding gets the number ``missing``."""
    there_PPGP = (p[:, None] < splits) & (g[None, :] < G)
    return tl.load(numbers + (row * splits + p[:, None]) * G + g[None, :], there_PPGP, missing)


@triton.jit
def _search(histograms, ks, heads, rows, row, LEVELS: tl.constexpr):
    """Return the leading bits of the k-th largest rank, as far as the histograms determine them. Also return how many
    of the k chosen keys have these bits."""
    wanted = tl.load(ks + row // heads)
    known = tl.full([], 0, tl.uint32)
    n = tl.arange(0, BINS)
    for level in tl.static_range(LEVELS):
        histogram_N = tl.load(histograms + (level * rows + row) * BINS + n)
        above_N = tl.sum(histogram_N, 0) - tl.cumsum(histogram_N, 0)
        is_it_N = (above_N < wanted) & (above_N + histogram_N >= wanted)
        known = (known << (10 if level == 2 else 11)) | tl.sum(tl.where(is_it_N, n, 0), 0).to(tl.uint32)
        wanted -= tl.sum(tl.where(is_it_N, above_N, 0), 0)
    return known, wanted


@triton.jit
def _histogram(digit_S, counts_S):
    """Return the histogram of the digits that ``counts_S`` selects.

    Unselected digits are counted as zeros, and these counts are subtracted.
    """
    histogram_N = tl.histogram(tl.where(counts_S, digit_S.to(tl.int32), 0), BINS)
    others = tl.sum((~counts_S).to(tl.int32), 0)
    return histogram_N - tl.where(tl.arange(0, BINS) == 0, others, 0)


@triton.jit
def _add(histogram, histogram_N):
    n = tl.arange(0, BINS)
    tl.atomic_add(histogram + n, histogram_N, histogram_N != 0)
