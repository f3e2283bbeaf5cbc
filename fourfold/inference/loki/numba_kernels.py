"""Run one decoding step on a CPU, compiled by Numba. Each thread computes whole KV heads, from scores to output.

The best k keys are selected without sorting, by the same radix search as in the Triton kernels. Each key's
score (see ``select.combine_heads``) becomes an unsigned integer, so that integers have the same order as scores. The
search then finds the k-th largest integer: first its leading 11 bits, then the next 11 bits, and then the last 10 bits.

All sums are float32. A NaN in a query makes its output NaN.

Shape letters as in attend.py. R = B · K rows, each a KV head of a sequence. H is G, the number of query heads
per KV head, rounded up to a multiple of four, because the kernel multiplies four heads at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numba import get_num_threads, njit, prange, set_num_threads
from numba.core.config import NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba sets it at import
from torch import Tensor

from fourfold.inference.loki.codes import PER_BYTE
from fourfold.inference.loki.numba_functions import OPTIONS, as_float32, compiled, exp, inlined, log, prefetch_row
from fourfold.inference.loki.numba_scores import score
from fourfold.inference.loki.select import DecodeStep
from fourfold.inference.loki.settings import LokiConfig

NEVER = np.float32(-np.inf)
TINY = np.float32(np.finfo(np.float32).tiny)
NAN_BITS = np.uint32(0x7F800000)
"""A float32 is NaN if its bits without the sign are above this value."""

LAST_RANK = np.uint32(0xFFFFFFFF)

AHEAD = 6
"""Number of keys or values to prefetch ahead. Chosen keys are scattered, so the processor cannot predict them."""

_numba_lock = threading.Lock()
"""Only one thread may call Numba at a time, because some of Numba's threading layers abort the process otherwise."""


def _compiled_for_threads(step: Callable[..., None]) -> Callable[..., None]:
    """Compile the function ``step`` to run on several threads, and cache the compiled code for later processes."""
    try:
        compiled: Callable[..., None] = njit(parallel=True, cache=True, **OPTIONS)(step)
    except RuntimeError:  # Numba finds no folder for its cache.
        compiled = njit(parallel=True, **OPTIONS)(step)
    return compiled


def decode(step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Run a decoding step on a CPU, with caches in float32 or bfloat16. Return the output, [B, K, G, D], and the
    log-sum-exps of the scores, [B, K, G]."""
    batch, heads, group, width = step.query_BKGD.shape
    length, rows = step.key_BKSD.shape[2], batch * heads
    # Check the shapes here, because compiled code reads out of bounds without an error.
    assert step.key_BKSD.shape == step.value_BKSD.shape == (batch, heads, length, width), "keys and values differ"
    assert step.code_BKSC.shape == (batch, heads, length, step.query_BKGd.shape[3] // PER_BYTE), "every key has codes"
    k_B = np.full(batch, step.k) if step.k_B is None else step.k_B.clamp(max=step.k).numpy()
    out_RHD, lse_RG = torch.empty(rows, -(-group // 4) * 4, width), torch.empty(rows, group)
    task = (
        _padded_to_fours(step.query_BKGd), _padded_to_fours(step.query_BKGD.float() * step.scaling),
        *_rows(step.code_BKSC), *_rows(step.key_BKSD), *_rows(step.value_BKSD),
        step.value_sum_BKD.float().flatten(0, 1).numpy(), heads, length, group,
        k_B, k_B.max(), _flags(step.visible_BS, batch), _flags(step.always_BS, batch), out_RHD.numpy(), lse_RG.numpy(),
    )  # fmt: skip
    wanted = torch.get_num_threads()
    with _numba_lock:
        before = get_num_threads()
        threads = min(rows, wanted, NUMBA_NUM_THREADS)
        set_num_threads(threads)
        try:
            _decode(threads, *task)
        except OSError:
            # Numba could not write its cache to disk. The compiled kernels still work, so run them again.
            _decode(threads, *task)
        finally:
            set_num_threads(before)
    # Starting Numba's threads changes torch's number of threads, because both use the same threading library.
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
    out_BKGD = out_RHD[:, :group].reshape(step.query_BKGD.shape).to(step.query_BKGD.dtype)
    return out_BKGD, lse_RG.view(batch, heads, group)


def compile_for(dtype: torch.dtype) -> None:
    """Compile the decoding step for caches of this dtype, or load it from disk. Then the first token does not wait."""
    query, keys = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4, dtype=dtype)
    codes = torch.zeros(1, 1, 2, 1, dtype=torch.uint8)
    decode(DecodeStep(query, query, keys, keys, query[:, :, 0], codes, 1, LokiConfig(k=1), 1.0))


def _padded_to_fours(query_BKGx: Tensor) -> np.ndarray:
    """Return the tensor as [R, H, x] in float32. Heads of zeros pad the number of heads to a multiple of four."""
    query_RGx = query_BKGx.float().flatten(0, 1)
    return torch.nn.functional.pad(query_RGx, (0, 0, 0, -query_RGx.shape[1] % 4)).contiguous().numpy()


def _rows(x_BKSD: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return a cached tensor, including its unused memory, as a matrix with one row per token and KV head, [rows, row
    stride]. Also return, for each of the R KV heads of all sequences, the index of its first row in this matrix."""
    batch, heads, length, _ = x_BKSD.shape
    of_batch, of_head, of_row, of_dim = x_BKSD.stride()
    assert of_dim == 1 and of_batch % of_row == of_head % of_row == 0, "a cache consists of whole rows"
    spanned = ((batch - 1) * of_batch + (heads - 1) * of_head) // of_row + length
    rows = x_BKSD.detach().as_strided((spanned, of_row), (of_row, 1))
    begins_BK = np.arange(batch)[:, None] * (of_batch // of_row) + np.arange(heads) * (of_head // of_row)
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy(), begins_BK.reshape(-1)


def _flags(flags_BS: Tensor | None, batch: int) -> np.ndarray:
    """Return the flags as an array [B, S], or an empty array [B, 0] if the flags are None."""
    return np.empty((batch, 0), np.int8) if flags_BS is None else flags_BS.numpy()


@_compiled_for_threads
def _decode(
    threads, query_RHd, query_RHD, codes, code_R, keys, key_R, values, value_R, value_sum_RD,
    heads, length, group, k_B, largest_k, visible_BS, kept_BS, out_RHD, lse_RG,
):  # fmt: skip
    """Divide the rows among threads. Each thread computes its rows one after another, and threads wait for each other
    only at the end.

    Splitting each row would keep more threads busy. But then all threads would wait for the slowest one after scores,
    selection, and attention. On a processor with other work, a step with split rows took ten times as long as a step
    with whole rows.
    """
    rows, H, _ = query_RHd.shape
    for thread in prange(threads):
        scores_HS = np.empty((H, length), np.float32)
        ranks_S = np.empty(length, np.uint32)
        chosen_k = np.empty(largest_k, np.uint32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            sequence = row // heads
            visible_S, kept_S = visible_BS[sequence], kept_BS[sequence]
            score(query_RHd[row], codes[code_R[row] : code_R[row] + length], scores_HS)
            seen = _rank(scores_HS[:group], visible_S, kept_S, ranks_S)
            chosen = chosen_k[: min(k_B[sequence], seen)]
            _choose(ranks_S, chosen)
            of_keys, of_values = keys[key_R[row] : key_R[row] + length], values[value_R[row] : value_R[row] + length]
            exact_H3, sum_D = np.empty((H, 3), np.float32), np.zeros(query_RHD.shape[2], np.float32)
            _attend(query_RHD[row], of_keys, of_values, chosen, out_RHD[row], exact_H3, sum_D)
            if chosen.size < seen:
                for c in range(sum_D.size):
                    sum_D[c] = (value_sum_RD[row, c] - sum_D[c]) / np.float32(seen - chosen.size)
                _add_rest(scores_HS[:group], chosen, exact_H3, sum_D, out_RHD[row])
            for g in range(group):
                lse_RG[row, g] = exact_H3[g, 0] + np.log(exact_H3[g, 1])


@compiled
def _rank(scores_GS, visible_S, kept_S, ranks_S):
    """Write each key's rank to ``ranks_S``. Ranks are unsigned integers in the same order as the combined scores.
    Replace each score in ``scores_GS`` with exp(score − largest). Return the number of visible keys.

    An invisible key has rank 0. A key has the largest rank if it is always chosen or if its combined score is NaN.
    """
    length = ranks_S.size
    if visible_S.size:
        for g in range(scores_GS.shape[0]):
            for s in range(length):
                if not visible_S[s]:
                    scores_GS[g, s] = NEVER
    worth_S = ranks_S.view(np.float32)  # Reuse the memory of ``ranks_S`` for the combined scores.
    worth_S[:] = np.float32(0)
    if scores_GS.shape[0] == 1:  # The scores of a single query head need no normalization to rank keys.
        worth_S[:] = scores_GS[0]
    for g in range(scores_GS.shape[0]):
        share = np.float32(1) / max(_exponentiate(scores_GS[g])[1], TINY)
        if scores_GS.shape[0] > 1:
            for s in range(length):
                worth_S[s] += scores_GS[g, s] * share
    for s in range(length):
        bits = ranks_S[s]
        rank = ~bits if bits >> np.uint32(31) else bits | np.uint32(0x80000000)
        ranks_S[s] = LAST_RANK if bits & np.uint32(0x7FFFFFFF) > NAN_BITS else rank
    for s in range(kept_S.size):
        ranks_S[s] = max(ranks_S[s], np.uint32(kept_S[s]) * LAST_RANK)
    if not visible_S.size:
        return length
    seen = 0
    for s in range(length):
        if visible_S[s]:
            seen += 1
        else:
            ranks_S[s] = 0
    return seen


@compiled
def _choose(ranks_S, chosen_k):
    """Fill ``chosen_k`` with the positions of the largest ranks, ascending. Among ties, take the leftmost."""
    least, wanted = _search(ranks_S, chosen_k.size)
    n = 0
    for s in range(ranks_S.size):
        if ranks_S[s] >= least:
            if ranks_S[s] == least:
                if wanted == 0:
                    continue
                wanted -= 1
            chosen_k[n] = s
            n += 1


@compiled
def _search(ranks_S, k):
    """Return the k-th largest rank, and how many of the k chosen keys have exactly this rank."""
    least, wanted = np.uint32(0), k
    for level in range(3):
        bits = np.uint32(10 if level == 2 else 11)
        shift = np.uint32(21 if level == 0 else 10 if level == 1 else 0)
        histogram_N = np.zeros(2048, np.int64)
        for s in range(ranks_S.size):
            if level == 0 or (ranks_S[s] >> shift) >> bits == least:
                histogram_N[(ranks_S[s] >> shift) & np.uint32((1 << bits) - 1)] += 1
        digit = (1 << bits) - 1
        while digit > 0 and histogram_N[digit] < wanted:
            wanted -= histogram_N[digit]
            digit -= 1
        least = np.uint32((least << bits) | np.uint32(digit))
    return least, wanted


@compiled
def _attend(query_HD, key_SD, value_SD, chosen_k, out_HD, exact_H3, sum_D):
    """Attend exactly to the chosen keys, and write the output to ``out_HD``. Without chosen keys, write zeros.

    For each query head, write to ``exact_H3``: the largest score, Σ exp(score − largest), and the mean score. Write the
    sum of the chosen values to ``sum_D``.
    """
    k = chosen_k.size
    weights_4k, share_4 = np.empty((4, k), np.float32), np.empty(4, np.float32)
    out_HD[:] = 0
    for h in range(0, query_HD.shape[0], 4):
        four = query_HD[h], query_HD[h + 1], query_HD[h + 2], query_HD[h + 3]
        for n in range(k):
            prefetch_row(key_SD, chosen_k[min(n + AHEAD, k - 1)])
            row_D = key_SD[chosen_k[n]]
            weights_4k[0, n], weights_4k[1, n], weights_4k[2, n], weights_4k[3, n] = _products(four, row_D)
        for i in range(4):
            exact_H3[h + i, 2] = weights_4k[i].sum() / np.float32(max(1, k))
            exact_H3[h + i, 0], exact_H3[h + i, 1] = _exponentiate(weights_4k[i])
            share_4[i] = np.float32(1) / max(exact_H3[h + i, 1], TINY)
        out0, out1, out2, out3 = out_HD[h], out_HD[h + 1], out_HD[h + 2], out_HD[h + 3]
        sum_D[:] = 0
        for n in range(k):
            prefetch_row(value_SD, chosen_k[min(n + AHEAD, k - 1)])
            weight0, weight1 = weights_4k[0, n] * share_4[0], weights_4k[1, n] * share_4[1]
            weight2, weight3 = weights_4k[2, n] * share_4[2], weights_4k[3, n] * share_4[3]
            row_D = value_SD[chosen_k[n]]
            for c in range(out0.size):
                number = as_float32(row_D[c])
                out0[c] += weight0 * number
                out1[c] += weight1 * number
                out2[c] += weight2 * number
                out3[c] += weight3 * number
                sum_D[c] += number


@compiled
def _add_rest(coded_GS, chosen_k, exact_H3, mean_D, out_HD):
    """Add the rest (all keys that are not chosen) to the output of each query head. ``mean_D`` is the mean value of the
    rest. Also add the rest's weights to the head's Σ exp(score − largest) in ``exact_H3``. See ``rest.py``.

    ``coded_GS`` has exp(score − largest) for the scores of the codes. This function changes it.
    """
    of_chosen_k = np.empty(chosen_k.size, np.float32)
    for g in range(coded_GS.shape[0]):
        for n in range(chosen_k.size):
            of_chosen_k[n] = coded_GS[g, chosen_k[n]]
            coded_GS[g, chosen_k[n]] = 0
        total = coded_GS[g].sum()
        mean = np.float32(0)
        for n in range(chosen_k.size):
            mean += log(of_chosen_k[n])
        constant = exact_H3[g, 2] - exact_H3[g, 0] - mean / np.float32(max(1, chosen_k.size))
        rest = total * np.exp(constant)
        exact_H3[g, 1] += rest
        share = rest / exact_H3[g, 1]
        for c in range(mean_D.size):
            out_HD[g, c] += share * (mean_D[c] - out_HD[g, c])


@inlined
def _products(four, key):
    """Return the dot product of each of four query heads with one key."""
    query0, query1, query2, query3 = four
    sum0, sum1, sum2, sum3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for c in range(query0.size):
        number = as_float32(key[c])
        sum0 += query0[c] * number
        sum1 += query1[c] * number
        sum2 += query2[c] * number
        sum3 += query3[c] * number
    return sum0, sum1, sum2, sum3


@compiled
def _exponentiate(scores_S):
    """Replace each score with exp(score − largest). NaN stays NaN. Return the largest score, and the sum of the new
    values without the NaNs."""
    largest, total = NEVER, np.float32(0)
    for s in range(scores_S.size):
        largest = scores_S[s] if scores_S[s] > largest else largest
    for s in range(scores_S.size):
        scores_S[s] = exp(scores_S[s] - largest)
        total += scores_S[s] if scores_S[s] == scores_S[s] else np.float32(0)
    return largest, total
