"""Select the keys that a step attends to: combine the scores in each KV group, and take the best k keys.

Shape letters: B sequences, K KV heads, G query heads per KV head, S keys, k chosen keys. In a simulation, the
underscore before S or k is a dim with the rows of a prompt. In a decoding step, this dim is absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fourfold.inference.loki.settings import LokiConfig

NEVER, ALWAYS = float("-inf"), float("inf")
SAMPLED = 32
"""The threshold is estimated from a sample that has one in this many of the numbers."""

THIN, LONG = 6, 1 << 14
"""Rows shorter than THIN · k or shorter than LONG are processed directly, without a threshold."""


@dataclass(frozen=True)
class DecodeStep:
    """One step of attention from a token to the best keys of its cache. Kernels compute it as [B, K, G, D]."""

    query_BKGD: Tensor
    query_BKGd: Tensor
    """Queries, projected and scaled."""
    key_BKSD: Tensor
    value_BKSD: Tensor
    proxy_BKSd: Tensor
    k: int
    config: LokiConfig
    scaling: float
    visible_B1S: Tensor | None = None
    k_B: Tensor | None = None

    @property
    def visible_BS(self) -> Tensor | None:
        """Return 1 for keys that a sequence sees, or None if it sees all keys."""
        return self._as_bytes(self.visible_B1S)

    @property
    def always_BS(self) -> Tensor | None:
        """Return 1 for keys that are chosen regardless of their scores, or None if there are none."""
        key_BKSD = self.key_BKSD
        return self._as_bytes(always_chosen(self.config, self.visible_B1S, key_BKSD.shape[2], key_BKSD.device))

    def _as_bytes(self, flags: Tensor | None) -> Tensor | None:
        batch, _, length, _ = self.key_BKSD.shape
        return None if flags is None else flags.expand(batch, 1, length)[:, 0].contiguous().view(torch.int8)


def combine_heads(scores_BKG_S: Tensor, reduce: str, visible_B1_S: Tensor | None = None) -> Tensor:
    """Return each key's combined score for its whole KV group, from the scores of each head. It is -inf for invisible
    keys.

    A NaN score becomes the highest combined score, so that the NaN shows in the output. The whole group shares one
    choice of keys, so each key is read once. With separate choices for its G heads, up to G times as many keys would be
    read.
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
    if scores_BKG_S.device.type == "cpu":  # On a GPU, the following test would make the host wait.
        worth_BK_S = torch.softmax(scores_BKG_S, -1, dtype=torch.float32).sum(2)
        if not worth_BK_S[..., :1].isnan().any():  # A single NaN or infinity would spread over its whole row.
            return worth_BK_S
    broken_BKG_S = ~(scores_BKG_S < ALWAYS)
    worth_BK_S = torch.softmax(scores_BKG_S.masked_fill(broken_BKG_S, NEVER), -1, dtype=torch.float32).sum(2)
    return worth_BK_S.masked_fill(broken_BKG_S.any(2), ALWAYS)


def keys_per_sequence(counts_B: Tensor, config: LokiConfig) -> Tensor:
    """Return the number of keys that each sequence attends to, [B], based on its visible tokens, without padding."""
    if config.k is None:
        k_B = (config.key_share * counts_B.double()).ceil().long().clamp(min=config.min_k)
    else:
        k_B = torch.full_like(counts_B, config.k)
    return torch.where(counts_B < config.min_seq, counts_B, torch.minimum(k_B, counts_B))


def choose_keys(
    worth_BK_S: Tensor, k: int, config: LokiConfig, visible_B1_S: Tensor | None = None, k_B: Tensor | None = None
) -> Tensor:
    """Return the positions of the k best keys, [B, K, …, k], unordered.

    These include the first ``sink`` keys and the last ``recent`` keys.

    If ``k_B`` gives the number of keys for each sequence, the best keys come first. If fewer than k keys are visible,
    the remaining positions are invisible, and attention must mask them.
    """
    kept_B1_S = always_chosen(config, visible_B1_S, worth_BK_S.shape[-1], worth_BK_S.device)
    if kept_B1_S is not None:
        worth_BK_S = worth_BK_S.masked_fill(kept_B1_S, ALWAYS)
    chosen_BK_k = top_places(worth_BK_S, k)
    if k_B is None:
        return chosen_BK_k
    order_BK_k = worth_BK_S.gather(-1, chosen_BK_k).argsort(-1, descending=True)
    return chosen_BK_k.gather(-1, order_BK_k)


def top_places(worth_BK_S: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest numbers of each row, in no particular order.

    Long rows on a CPU are not sorted. A sample gives a threshold that more than k numbers should reach, with a margin
    of four standard deviations, and only these numbers are compared. If fewer than k numbers reach it, all numbers
    are compared. Otherwise the positions ascend, which is the fastest order for reading memory.
    """
    length = worth_BK_S.shape[-1]
    chosen_Rk = None
    if worth_BK_S.device.type == "cpu" and worth_BK_S.numel() and length > max(LONG, THIN * k):
        chosen_Rk = places_above_threshold(worth_BK_S.reshape(-1, length), k)
    if chosen_Rk is None:
        return torch.topk(worth_BK_S, k, dim=-1, sorted=False).indices
    return chosen_Rk.view(*worth_BK_S.shape[:-1], k)


def places_above_threshold(worth_RS: Tensor, k: int) -> Tensor | None:
    """Return the positions of the k largest numbers in each of R rows, [R, k], or None if the sample of a row gave no
    useful threshold."""
    narrow = worth_RS.dtype in (torch.bfloat16, torch.float16)
    numbers_RS = (worth_RS.float() if narrow else worth_RS).detach().numpy()
    rows, length = numbers_RS.shape
    sample_Rs = numbers_RS[:, ::SAMPLED]
    expected = k / SAMPLED
    threshold_R = _largest(sample_Rs, min(sample_Rs.shape[1], math.ceil(expected + 4 * math.sqrt(expected))))
    if np.isneginf(threshold_R).any():
        return None
    # As in topk, a NaN counts as the largest number. It is not below any threshold.
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
    if np.count_nonzero(taken) > rows * k:  # If several numbers tie for the last place, take the leftmost.
        tied, starts_R = numbers == least, ends_R - counts_R
        above_R = np.add.reduceat(numbers > least, starts_R, dtype=np.int64)
        tied_before = np.cumsum(tied) - tied
        nth = tied_before - np.repeat(tied_before[starts_R], counts_R)
        taken &= ~tied | (nth < np.repeat(k - above_R, counts_R))
    return torch.from_numpy(candidates[taken].reshape(rows, k) - np.arange(rows)[:, None] * length)


def _largest(numbers_RS: NDArray[np.floating], k: int) -> NDArray[np.floating]:
    """Return the k-th largest number of each row, [R]."""
    place = numbers_RS.shape[1] - k
    return np.partition(numbers_RS, place, axis=1)[:, place]


def always_chosen(
    config: LokiConfig, visible_B1_S: Tensor | None, length: int, device: torch.device | str
) -> Tensor | None:
    """Return True for the first ``sink`` and the last ``recent`` visible keys, [S] or shaped like ``visible_B1_S``."""
    if not config.sink and not config.recent:
        return None
    if visible_B1_S is None:
        places_S = torch.arange(length, device=device)
        return (places_S < config.sink) | (places_S >= length - config.recent)
    from_left = visible_B1_S.cumsum(-1)
    from_right = from_left[..., -1:] - from_left
    return visible_B1_S & ((from_left <= config.sink) | (from_right < config.recent))
