"""Simulate Loki for all tokens of a prompt in one pass, by masking. The Loki paper (arXiv 2406.02542) measures
perplexity like this.

One pass over a text gives the same results as decoding it token by token, with one exception: k and ``min_seq`` are
applied to the length of the whole text. So every token attends to as many keys as the last token, or to all keys that
it sees if there are fewer. The paper does the same, so the results are comparable.

Shape letters: B sequences, N query heads, K KV heads, G = N / K, Q rows (one per query), S keys, D head_dim, d leading
components.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.inference.loki.codes import BITS, Encoder, decoded
from fourfold.inference.loki.rest import share_of_chosen
from fourfold.inference.loki.select import NEVER, choose_keys, combine_heads, keys_per_sequence
from fourfold.inference.loki.settings import LokiConfig

CHUNK_SCORES = 1 << 24
"""Largest number of scores in memory at a time."""


@dataclass
class Probe:
    """Records how well one layer chooses keys, for every query that sees more keys than it may attend to. Each list has
    one tensor per call of ``add``, with one value per query and KV head."""

    recall: list[Tensor] = field(default_factory=list)
    """The fraction of the best keys that Loki chose. The best keys are the k keys with the largest exact scores."""
    mass: list[Tensor] = field(default_factory=list)
    """Fraction of the exact softmax that is on the chosen keys, averaged over the query heads of the KV head."""

    def add(self, chosen_BKQS: Tensor, best_BKQS: Tensor, weights_BKGQS: Tensor, sparse_BKQ: Tensor) -> None:
        found_BKQ = (chosen_BKQS & best_BKQS).sum(-1) / best_BKQS.sum(-1).clamp(min=1)
        mass_BKQ = (weights_BKGQS * chosen_BKQS[:, :, None]).sum(-1).mean(2)
        self.recall.append(found_BKQ[sparse_BKQ].float().cpu())
        self.mass.append(mass_BKQ[sparse_BKQ].float().cpu())


def simulate(
    query_BNQD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    encoder: Encoder | None,
    config: LokiConfig,
    scaling: float,
    mask_B1QS: Tensor | None = None,
    probe: Probe | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attend from each token of a prompt to the best of the keys up to this token. Return the outputs, [B, N, Q, D],
    with Q = S.

    Args:
        encoder: The layer's encoder, as ``LokiBasis.of_layer`` returns it. None ranks the keys by their exact scores.
        mask_B1QS: True if a query may see a key. None for causal attention. If ``config.k`` is not set, the number of
            keys to attend to is a fraction of the keys that a sequence's queries can see, so padding does not count.
        probe: Records the quality of the choices.
        sinks_N: The sink of each query head, if the model has sinks.
    """
    out = []
    rows = choices(query_BNQD, key_BKSD, encoder, config, scaling, mask_B1QS, probe)
    for visible_B1QS, ranking_BKGQS, scores_BKGQS, chosen_BKQS in rows:
        weights_BKGQS = torch.softmax(scores_BKGQS.masked_fill(~chosen_BKQS[:, :, None], NEVER), -1)
        weights_BKGQS = weights_BKGQS.masked_fill(~visible_B1QS.any(-1, keepdim=True)[:, :, None], 0.0)
        # Without codes (16 bits), keys that are not chosen have no effect on the output, as in the Loki paper.
        is_rest_BK1QS = (visible_B1QS & ~chosen_BKQS & (config.bits == BITS))[:, :, None]
        share_BKGQ1, lse_BKGQ1 = share_of_chosen(
            scores_BKGQS, ranking_BKGQS, chosen_BKQS[:, :, None], ranking_BKGQS, is_rest_BK1QS
        )
        rest_BK1QS = is_rest_BK1QS / is_rest_BK1QS.sum(-1, keepdim=True).clamp(min=1)
        weights_BKGQS = share_BKGQ1 * weights_BKGQS + (1 - share_BKGQ1) * rest_BK1QS
        if sinks_N is not None:
            weights_BKGQS = weights_BKGQS * torch.sigmoid(lse_BKGQ1 - sinks_N.view(*lse_BKGQ1.shape[1:3], 1, 1))
        out.append(torch.matmul(weights_BKGQS.to(value_BKSD.dtype), value_BKSD[:, :, None]))
    return torch.cat(out, dim=3).flatten(1, 2)


def choices(
    query_BNQD: Tensor,
    key_BKSD: Tensor,
    encoder: Encoder | None,
    config: LokiConfig,
    scaling: float,
    mask_B1QS: Tensor | None = None,
    probe: Probe | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Choose the keys that each token of a prompt attends to. The arguments have the same meaning as for ``simulate``.

    Yield four tensors for some rows at a time: a mask of the keys that each row sees, the scores that rank the keys,
    the exact scores, and a mask of the keys that each row chooses.
    """
    query_BKGQD = query_BNQD.unflatten(1, (key_BKSD.shape[1], -1))
    query_BKGQd, key_BKSd = query_BKGQD.float(), key_BKSD.float()
    if encoder is not None:
        query_BKGQd = encoder.project_queries(query_BKGQD.flatten(2, 3)).unflatten(2, query_BKGQD.shape[2:4])
        is_coded = config.bits == BITS
        key_BKSd = decoded(encoder.encode(key_BKSD), torch.float32) if is_coded else encoder.project_keys(key_BKSD)
    length = key_BKSD.shape[2]
    rows = max(1, CHUNK_SCORES // (query_BNQD.shape[0] * query_BNQD.shape[1] * length))
    k_B = None if mask_B1QS is None else keys_per_sequence(mask_B1QS[:, 0].sum(-1).amax(-1), config)
    k = config.key_count(length) if k_B is None else config.largest_key_count(length)
    for first in range(0, length, rows):
        chunk = slice(first, min(first + rows, length))
        visible_B1QS = _causal(chunk, length, key_BKSD.device) if mask_B1QS is None else mask_B1QS[:, :, chunk]
        ranking_BKGQS = torch.matmul(query_BKGQd[:, :, :, chunk] * scaling, key_BKSd.transpose(-1, -2)[:, :, None])
        chosen_BKQS = _best(ranking_BKGQS, k, config, visible_B1QS, k_B)
        scores_BKGQS = torch.matmul(query_BKGQD[:, :, :, chunk], key_BKSD.transpose(-1, -2)[:, :, None])
        scores_BKGQS = scores_BKGQS.float() * scaling
        if probe is not None:
            best_BKQS = _best(scores_BKGQS, k, only_by_score(config), visible_B1QS, k_B)
            weights_BKGQS = torch.softmax(scores_BKGQS.masked_fill(~visible_B1QS[:, :, None], NEVER), -1)
            is_sparse_B1Q = visible_B1QS.sum(-1) > (k if k_B is None else k_B[:, None, None])
            probe.add(chosen_BKQS, best_BKQS, weights_BKGQS, is_sparse_B1Q.expand(best_BKQS.shape[:3]))
        yield visible_B1QS, ranking_BKGQS, scores_BKGQS, chosen_BKQS


def only_by_score(config: LokiConfig) -> LokiConfig:
    """Return the settings without first and last keys that are always chosen."""
    return config.model_copy(update={"sink": 0, "recent": 0})


def _best(scores_BKGQS: Tensor, k: int, config: LokiConfig, visible_B1QS: Tensor, k_B: Tensor | None) -> Tensor:
    """Return a mask of the visible keys that each row chooses by these scores. A row chooses k keys, or the number in
    ``k_B`` for the row's sequence if ``k_B`` is given."""
    worth_BKQS = combine_heads(scores_BKGQS, visible_B1QS)
    places_BKQk = choose_keys(worth_BKQS, k, config, visible_B1QS, k_B)
    chosen_BKQS = torch.zeros_like(worth_BKQS, dtype=torch.bool)
    if k_B is None:
        return chosen_BKQS.scatter_(-1, places_BKQk, True) & visible_B1QS
    is_kept_BKQk = torch.arange(places_BKQk.shape[-1], device=k_B.device) < k_B[:, None, None, None]
    return chosen_BKQS.scatter_(-1, places_BKQk, is_kept_BKQk.expand_as(places_BKQk)) & visible_B1QS


def _causal(chunk: slice, length: int, device: torch.device) -> Tensor:
    rows_Q1 = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
    return (torch.arange(length, device=device) <= rows_Q1)[None, None]
