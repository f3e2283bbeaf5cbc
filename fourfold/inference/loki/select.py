"""Which keys a step attends to: scores, agreed on within each KV group, and the best k of them.

Letters of shapes: B sequences, K KV heads, G query heads of one KV head, S keys, k chosen keys; … is nothing in a
decoding step, and the rows of a prompt in a simulation of many of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.inference.loki.config import DEFAULT_K_F, LokiConfig

NEVER, ALWAYS = float("-inf"), float("inf")
SAMPLED = 16
"""One number in so many tells the threshold."""

THIN = 6
"""Rows of fewer than so many times k numbers are not worth a threshold."""


def agree(scores_BKG_S: Tensor, reduce: str, visible_B1_S: Tensor | None = None) -> Tensor:
    """What each key is worth to a whole KV group, from scores of each head; -inf where it must not be seen.

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
    worth_BK_S = torch.softmax(scores_BKG_S, -1, dtype=torch.float32).sum(2)
    return worth_BK_S if visible_B1_S is None else worth_BK_S.masked_fill(~visible_B1_S, NEVER)


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
    return best(worth_BK_S, k) if k_B is None else torch.topk(worth_BK_S, k, dim=-1).indices


def best(worth_BK_S: Tensor, k: int) -> Tensor:
    """Places of the k largest numbers of each row, in no order.

    A long row on a CPU is not sorted: a sample tells a threshold that about a tenth more than k numbers reach, and only
    these are looked at. Should fewer reach it, all are. Places then come from the left, as memory is read fastest.
    """
    row_S = worth_BK_S.flatten()
    is_long_row = len(row_S) == worth_BK_S.shape[-1] and len(row_S) > THIN * k
    if worth_BK_S.device.type == "cpu" and is_long_row:
        sample = row_S[::SAMPLED]
        threshold = torch.topk(sample, min(len(sample), int(1.1 * k / SAMPLED) + 8)).values[-1]
        candidates = (row_S >= threshold).nonzero().flatten()
        if len(candidates) >= k:
            worth = row_S[candidates]
            top = torch.topk(worth, k, sorted=False)
            chosen = candidates[worth >= top.values.min()]
            if len(chosen) > k:  # others are worth as much as the last of them
                chosen = candidates[top.indices]
            return chosen.view(*worth_BK_S.shape[:-1], k)
    return torch.topk(worth_BK_S, k, dim=-1, sorted=False).indices


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
