"""Which keys a step attends to: scores, agreed on within each KV group, and the best k of them.

Letters of shapes: B sequences, K KV heads, G query heads of one KV head, S keys, k chosen keys; … is nothing in a
decoding step, and the rows of a prompt in a simulation of many of them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fourfold.inference.loki.settings import DEFAULT_K_F, LokiConfig

NEVER, ALWAYS = float("-inf"), float("inf")
SAMPLED = 32
"""One number in so many tells the threshold."""

THIN, LONG = 6, 1 << 14
"""Rows of fewer than so many times k numbers, or of fewer than so many, are not worth a threshold."""


def agree(scores_BKG_S: Tensor, reduce: str, visible_B1_S: Tensor | None = None) -> Tensor:
    """What each key is worth to a whole KV group, from scores of each head; -inf where it must not be seen.

    A key with a score that is no number is worth most, so that a NaN is seen, and not lost.

    One choice for the group reads each key once; a choice for each of its G heads would read up to G times as many.
    """
    if visible_B1_S is not None:
        scores_BKG_S = scores_BKG_S.masked_fill(~visible_B1_S[:, :, None], NEVER)
    if scores_BKG_S.shape[2] == 1:
        return scores_BKG_S[:, :, 0]
    if reduce == "max":
        return scores_BKG_S.amax(2)
    if reduce == "mean":
        return scores_BKG_S.mean(2)
    worth_BK_S = _summed_softmax(scores_BKG_S)
    return worth_BK_S if visible_B1_S is None else worth_BK_S.masked_fill(~visible_B1_S, NEVER)


def _summed_softmax(scores_BKG_S: Tensor) -> Tensor:
    if scores_BKG_S.device.type == "cpu":  # a GPU is not waited for to tell
        worth_BK_S = torch.softmax(scores_BKG_S, -1, dtype=torch.float32).sum(2)
        if not worth_BK_S[..., :1].isnan().any():  # one NaN, or infinity, makes a row of them
            return worth_BK_S
    broken_BKG_S = ~(scores_BKG_S < ALWAYS)
    worth_BK_S = torch.softmax(scores_BKG_S.masked_fill(broken_BKG_S, NEVER), -1, dtype=torch.float32).sum(2)
    return worth_BK_S.masked_fill(broken_BKG_S.any(2), ALWAYS)


def keys_of_each(counts_B: Tensor, config: LokiConfig) -> Tensor:
    """How many keys sequences of so many visible tokens attend to, as each would alone, [B]: no padding counts."""
    if config.k is None:
        share = DEFAULT_K_F if config.k_f is None else config.k_f
        k_B = (share * counts_B.double()).ceil().long().clamp(min=config.min_k)
    else:
        k_B = torch.full_like(counts_B, config.k)
    return torch.where(counts_B < config.min_seq, counts_B, torch.minimum(k_B, counts_B))


def choose(
    worth_BK_S: Tensor, k: int, config: LokiConfig, visible_B1_S: Tensor | None = None, k_B: Tensor | None = None
) -> Tensor:
    """Places of the k best keys, [B, K, …, k] in no order; the first ``sink`` and last ``recent`` are among them.

    k_B: how many of them each sequence may attend to; the best then come first.

    Where fewer than k keys can be seen, the rest are some that cannot: attention must mask them.
    """
    kept_B1_S = kept_ends(config, visible_B1_S, worth_BK_S.shape[-1], worth_BK_S.device)
    if kept_B1_S is not None:
        worth_BK_S = worth_BK_S.masked_fill(kept_B1_S, ALWAYS)
    chosen_BK_k = best(worth_BK_S, k)
    if k_B is None:
        return chosen_BK_k
    order_BK_k = worth_BK_S.gather(-1, chosen_BK_k).argsort(-1, descending=True)
    return chosen_BK_k.gather(-1, order_BK_k)


def best(worth_BK_S: Tensor, k: int) -> Tensor:
    """Places of the k largest numbers of each row, in no order.

    Long rows on a CPU are not sorted: a sample tells a threshold that more than k numbers reach, by four standard
    deviations, and only these are looked at. Should fewer reach it, all are. Places then come from the left, as memory
    is read fastest.
    """
    length = worth_BK_S.shape[-1]
    chosen_Rk = None
    if worth_BK_S.device.type == "cpu" and worth_BK_S.numel() and length > max(LONG, THIN * k):
        chosen_Rk = _best_above_a_threshold(worth_BK_S.reshape(-1, length), k)
    if chosen_Rk is None:
        return torch.topk(worth_BK_S, k, dim=-1, sorted=False).indices
    return chosen_Rk.view(*worth_BK_S.shape[:-1], k)


def _best_above_a_threshold(worth_RS: Tensor, k: int) -> Tensor | None:
    """Places of the k largest of each of R rows, [R, k]; None where a row's sample misled, or saw too little."""
    narrow = worth_RS.dtype in (torch.bfloat16, torch.float16)
    numbers_RS = (worth_RS.float() if narrow else worth_RS).detach().numpy()
    rows, length = numbers_RS.shape
    sample_Rs = numbers_RS[:, ::SAMPLED]
    expected = k / SAMPLED
    threshold_R = _largest(sample_Rs, min(sample_Rs.shape[1], math.ceil(expected + 4 * math.sqrt(expected))))
    if np.isneginf(threshold_R).any():
        return None
    # A NaN is the largest, as to topk, and is not below anything.
    candidates = np.flatnonzero(~(numbers_RS < threshold_R[:, None]))
    ends_R = np.searchsorted(candidates, np.arange(1, rows + 1) * length)
    counts_R = np.diff(ends_R, prepend=0)
    if counts_R.min() < k or counts_R.max() > length // 2:
        return None
    numbers = numbers_RS.reshape(-1)[candidates]
    numbers[np.isnan(numbers)] = ALWAYS
    numbers_RC = np.full((rows, counts_R.max()), NEVER, numbers.dtype)
    numbers_RC[np.arange(counts_R.max()) < counts_R[:, None]] = numbers
    least = np.repeat(_largest(numbers_RC, k), counts_R)
    taken = numbers >= least
    if np.count_nonzero(taken) > rows * k:  # of those worth as much as the last, the first are taken
        tied, starts_R = numbers == least, ends_R - counts_R
        above_R = np.add.reduceat(numbers > least, starts_R, dtype=np.int64)
        tied_before = np.cumsum(tied) - tied
        nth = tied_before - np.repeat(tied_before[starts_R], counts_R)
        taken &= ~tied | (nth < np.repeat(k - above_R, counts_R))
    return torch.from_numpy(candidates[taken].reshape(rows, k) - np.arange(rows)[:, None] * length)


def _largest(numbers_RS: np.ndarray, k: int) -> np.ndarray:
    """The k-th largest of each row, [R]."""
    place = numbers_RS.shape[1] - k
    return np.partition(numbers_RS, place, axis=1)[:, place]


def kept_ends(
    config: LokiConfig, visible_B1_S: Tensor | None, length: int, device: torch.device | str
) -> Tensor | None:
    """Which are the first ``sink`` and the last ``recent`` of the keys that can be seen, [S] or as ``visible_B1_S``."""
    if not config.sink and not config.recent:
        return None
    if visible_B1_S is None:
        places_S = torch.arange(length, device=device)
        return (places_S < config.sink) | (places_S >= length - config.recent)
    from_left = visible_B1_S.cumsum(-1)
    from_right = from_left[..., -1:] - from_left
    return visible_B1_S & ((from_left <= config.sink) | (from_right < config.recent))
