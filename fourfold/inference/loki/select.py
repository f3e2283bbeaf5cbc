"""Select the keys that a step attends to: combine the scores in each KV group, and take the best k keys.

Shape letters: B sequences, K KV heads, G query heads per KV head, S keys, k chosen keys. D, d, and C as in attend.py.
In a simulation, the underscore before S or k stands for a dim with the queries of a prompt. In a decoding step, this
dim is absent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.inference.loki.settings import LokiConfig

NEVER, ALWAYS = float("-inf"), float("inf")


@dataclass(frozen=True)
class DecodeStep:
    """The arguments of one decoding step: attention from one token of each sequence to the best cached keys.

    The functions that run a step return the output, [B, K, G, D], and the log-sum-exps of the scores, [B, K, G].
    """

    query_BKGD: Tensor
    query_BKGd: Tensor
    """Queries, projected to the leading components and multiplied by ``scaling``."""
    key_BKSD: Tensor
    value_BKSD: Tensor
    value_sum_BKD: Tensor
    """Sum of the values that each sequence sees."""
    code_BKSC: Tensor
    k: int
    config: LokiConfig
    scaling: float
    visible_B1S: Tensor | None = None
    k_B: Tensor | None = None

    @property
    def visible_BS(self) -> Tensor | None:
        """Return a mask with 1 for each key that a sequence sees. Return None if every sequence sees all keys."""
        return self._as_bytes(self.visible_B1S)

    @property
    def seen_B(self) -> Tensor:
        """Return how many keys each sequence sees."""
        batch, _, length, _ = self.key_BKSD.shape
        if self.visible_B1S is None:
            return torch.full((batch,), length, device=self.key_BKSD.device)
        return self.visible_B1S[:, 0].sum(-1)

    @property
    def always_BS(self) -> Tensor | None:
        """Return a mask with 1 for each key that is chosen regardless of its score, or None if there is no such key."""
        length, device = self.key_BKSD.shape[2], self.key_BKSD.device
        return self._as_bytes(always_chosen(self.config, self.k, self.k_B, self.visible_B1S, length, device))

    def _as_bytes(self, flags: Tensor | None) -> Tensor | None:
        batch, _, length, _ = self.key_BKSD.shape
        return None if flags is None else flags.expand(batch, 1, length)[:, 0].contiguous().view(torch.int8)


def combine_heads(scores_BKG_S: Tensor, visible_B1_S: Tensor | None = None) -> Tensor:
    """Return each key's combined score for its whole KV group: the sum of the heads' softmaxes, or the score itself if
    there is one head. Invisible keys have the score -inf.

    The whole group shares one choice of keys, because G separate choices would read up to G times as many keys.
    """
    if visible_B1_S is not None:
        scores_BKG_S = scores_BKG_S.masked_fill(~visible_B1_S[:, :, None], NEVER)
    if scores_BKG_S.shape[2] == 1:
        return scores_BKG_S[:, :, 0]
    worth_BK_S = torch.softmax(scores_BKG_S, -1, dtype=torch.float32).sum(2)
    return worth_BK_S if visible_B1_S is None else worth_BK_S.masked_fill(~visible_B1_S, NEVER)


def keys_per_sequence(counts_B: Tensor, config: LokiConfig) -> Tensor:
    """Return the number of keys that each sequence attends to, [B]. ``counts_B`` has the number of visible tokens in
    each sequence, without padding."""
    if config.k is None:
        k_B = (config.k_f * counts_B.double()).ceil().long().clamp(min=config.min_k)
    else:
        k_B = torch.full_like(counts_B, config.k)
    return torch.where(counts_B < config.min_seq, counts_B, torch.minimum(k_B, counts_B))


def choose_keys(
    worth_BK_S: Tensor, k: int, config: LokiConfig, visible_B1_S: Tensor | None = None, k_B: Tensor | None = None
) -> Tensor:
    """Return the positions of the k best keys, [B, K, …, k]. The positions include the first and the last keys
    that ``config`` always chooses.

    The positions are unordered, except that with ``k_B`` the best keys come first. If fewer than k keys are visible,
    the remaining positions are of invisible keys, and attention must mask them.
    """
    kept_B1_S = always_chosen(config, k, k_B, visible_B1_S, worth_BK_S.shape[-1], worth_BK_S.device)
    if kept_B1_S is not None:
        worth_BK_S = worth_BK_S.masked_fill(kept_B1_S, ALWAYS)
    chosen_BK_k = torch.topk(worth_BK_S, k, dim=-1, sorted=False).indices
    if k_B is None:
        return chosen_BK_k
    order_BK_k = worth_BK_S.gather(-1, chosen_BK_k).argsort(-1, descending=True)
    return chosen_BK_k.gather(-1, order_BK_k)


def always_chosen(
    config: LokiConfig, k: int, k_B: Tensor | None, visible_B1_S: Tensor | None, length: int, device: torch.device | str
) -> Tensor | None:
    """Return a mask of the first and the last visible keys that are always chosen. Its shape is [S], or the shape of
    ``visible_B1_S`` if this mask is given. Return None if ``config`` always chooses no keys."""
    if config.sink == config.recent == 0:
        return None
    sink, recent = config.ends(torch.tensor(k) if k_B is None else k_B)
    if visible_B1_S is None:
        kept_S = torch.zeros(length, dtype=torch.bool, device=device)
        kept_S[: int(sink)] = kept_S[max(0, length - int(recent)) :] = True
        return kept_S
    shape = (-1, *[1] * (visible_B1_S.dim() - 1))
    from_left = visible_B1_S.cumsum(-1)
    from_right = from_left[..., -1:] - from_left
    return visible_B1_S & ((from_left <= sink.view(shape).to(device)) | (from_right < recent.view(shape).to(device)))
