"""Bound the probability that a model writes a suffix nearly word for word.

Let p_ε be the probability that a sampled text is within ε edits of the suffix. Texts have the length of the suffix, and
edits are counted in tokens (Levenshtein distance). To measure p_ε by sampling, one would need about 100,000 texts per
document. Instead, a beam search follows the most likely texts that can still end within ε edits. The sum of their exact
probabilities is a lower bound of p_ε (arXiv 2603.24917). Texts that the search drops could also have ended within ε
edits. The upper bound is the lower bound plus the sum of the probabilities of these dropped texts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from fourfold.memorization.scorers import Scorer
from fourfold.memorization.scores import AttackSampling, likely_tokens

Tokens = NDArray[np.int64]
LogP = NDArray[np.float64]

BRANCHES = 64
"""Largest number of next tokens that the search tries for each text. The search tries the most likely tokens."""


@dataclass(frozen=True)
class NearVerbatim:
    """Bounds for one document. ``lower`` and ``upper`` have the bounds of ln p_ε for ε = 0, 1, …, up to the
    tolerance."""

    lower: LogP
    upper: LogP
    cost: float
    """Number of tokens that the model read during the search, divided by the document's length."""


@dataclass
class _Search:
    """The beam search for texts near one suffix of S tokens. It keeps at most ``width`` texts."""

    suffix: Tokens
    tolerance: int
    width: int

    def __post_init__(self) -> None:
        self.places = np.arange(len(self.suffix) + 1)
        self.texts_BI = np.zeros((1, 0), dtype=np.int64)
        """The texts so far [B, I]. All of them have I tokens."""
        self.log_p_B = np.zeros(1)
        self.rows_BS = self.places[None]
        """[B, S + 1]. Column j has the edit distance between each text and the first j tokens of the suffix."""
        self.dropped = np.full(self.tolerance + 1, -math.inf)
        """Entry ε is ln of the total probability of the dropped texts that could still have ended at edit distance ε,
        but at no smaller distance."""
        self.read = 0

    def extend(self, ids_BK: Tokens, log_p_BK: LogP, is_complete: bool) -> None:
        """Extend each text by each of K tokens. Keep the most likely of the extended texts that can still end within
        the tolerance.

        Args:
            ids_BK: For each text, the ids of K tokens that can follow it.
            log_p_BK: ln of the probability of each of these tokens.
            is_complete: Whether all tokens that are not in ``ids_BK`` have probability 0.
        """
        if not is_complete:
            others_B = np.maximum(0, 1 - np.exp(log_p_BK).sum(1))
            with np.errstate(divide="ignore"):
                self._drop(self._nearest(self.rows_BS), self.log_p_B + np.log(others_B))
        log_p_BK = self.log_p_B[:, None] + log_p_BK
        rows_BKS = self._next_rows(ids_BK)
        nearest_BK = self._nearest(rows_BKS, 1)
        text_N, token_N = np.nonzero((nearest_BK <= self.tolerance) & np.isfinite(log_p_BK))
        order_N = np.argsort(-log_p_BK[text_N, token_N], kind="stable")
        pruned, kept = ((text_N[part], token_N[part]) for part in (order_N[self.width :], order_N[: self.width]))
        self._drop(nearest_BK[pruned], log_p_BK[pruned])
        self.texts_BI = np.concatenate([self.texts_BI[kept[0]], ids_BK[kept][:, None]], axis=1)
        self.log_p_B, self.rows_BS = log_p_BK[kept], rows_BKS[kept]

    def bounds(self, log_p_suffix: float) -> tuple[LogP, LogP]:
        """Return the lower bounds and then the upper bounds of ln p_ε, for every ε.

        The suffix itself counts with its known probability (``log_p_suffix`` is ln of it), even if the search has
        dropped it. So both bounds of p_0 are exact.
        """
        found = np.full(self.tolerance + 1, -math.inf)
        np.logaddexp.at(found, self.rows_BS[:, -1], self.log_p_B)
        found[0] = log_p_suffix
        lower = np.minimum(0.0, np.logaddexp.accumulate(found))
        upper = np.minimum(0.0, np.logaddexp(lower, np.logaddexp.accumulate(self.dropped)))
        upper[0] = lower[0]
        return lower, upper

    def _next_rows(self, ids_BK: Tokens) -> Tokens:
        differs_BKS = ids_BK[:, :, None] != self.suffix
        cost_BKS = np.empty((*ids_BK.shape, len(self.places)), dtype=np.int64)
        cost_BKS[..., 0] = self.texts_BI.shape[1] + 1
        cost_BKS[..., 1:] = np.minimum(self.rows_BS[:, None, 1:] + 1, self.rows_BS[:, None, :-1] + differs_BKS)
        # Each step to the right in a row of the edit-distance table costs one insertion.
        best: Tokens = np.minimum.accumulate(cost_BKS - self.places, axis=-1) + self.places
        return best

    def _nearest(self, rows: Tokens, more: int = 0) -> Tokens:
        """Return the smallest edit distance to the whole suffix that each text can still reach.

        A row has the edit distances between the text so far and each beginning of the suffix. After one of these
        beginnings, the suffix has a certain number of tokens left. If the text will get n tokens more (or n fewer) than
        this number, it needs at least n more edits.

        Args:
            rows: Rows of the edit-distance table [..., S + 1].
            more: Number of tokens that each text has in addition to ``texts_BI``.
        """
        nearest: Tokens = (rows + np.abs(self.places - (self.texts_BI.shape[1] + more))).min(-1)
        return nearest

    def _drop(self, nearest_N: Tokens, log_p_N: LogP) -> None:
        np.logaddexp.at(self.dropped, nearest_N, log_p_N)


def near_verbatim(
    scorer: Scorer,
    documents: Sequence[Tokens],
    log_p_suffixes: Sequence[float],
    suffix: int,
    tolerance: int,
    width: int,
    sampling: AttackSampling,
) -> list[NearVerbatim]:
    """For each document, compute bounds of p_ε. This is the probability that a text that the model samples in place of
    the document's suffix is within ε edits of the suffix.

    Every process of the model's grid must call this. Each new token takes one forward pass over the whole texts. There
    is no cache, so this works on any grid.

    Args:
        scorer: The model.
        documents: Token ids of each document [T].
        log_p_suffixes: For each suffix, ln of the probability that a sampled text equals the suffix. Only rank 0 needs
            these values.
        suffix: Number of tokens S at the end of each document that are its suffix.
        tolerance: The largest ε.
        width: Beam width: the number of texts that the search keeps for each document.
        sampling: The attacker's sampling scheme.

    Returns:
        On rank 0, the bounds for each document. Empty on other ranks.
    """
    branches = min(scorer.vocab_size, sampling.top_k or BRANCHES, BRANCHES)
    is_complete = branches in (scorer.vocab_size, sampling.top_k)
    searches = [_Search(document[-suffix:], tolerance, width) for document in documents]
    fields = partial(likely_tokens, sampling=sampling, count=branches)
    for _ in range(suffix):
        texts = [
            np.concatenate([document[:-suffix], text, [0]])
            for document, search in zip(documents, searches, strict=True)
            for text in search.texts_BI
        ]
        # Rank 0 alone knows which texts are left, so it tells all other ranks.
        if dist.is_initialized():
            box = [texts]
            dist.broadcast_object_list(box, src=0)
            texts = box[0]
        scored = scorer.score(texts, fields, last=1) if texts else []
        if scored is None:
            continue
        first = 0
        for search, document in zip(searches, documents, strict=True):
            these = scored[first : first + len(search.texts_BI)]
            first += len(these)
            if these:
                ids_BK, log_p_BK = np.stack(these)[:, :, 0].reshape(len(these), 2, branches).swapaxes(0, 1)
                search.read += len(these) * (len(document) - suffix + search.texts_BI.shape[1])
                search.extend(ids_BK.astype(np.int64), log_p_BK.astype(np.float64), is_complete)
    if dist.is_initialized() and dist.get_rank():
        return []
    return [
        NearVerbatim(*search.bounds(log_p), search.read / len(document))
        for search, log_p, document in zip(searches, log_p_suffixes, documents, strict=True)
    ]
