"""Membership inference: does a score tell the documents that were trained on from those that were not?

All scores are turned so that higher says member.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.memorization.scores import TokenScores
from fourfold.memorization.statistics import auc, auc_interval, true_positive_rate

LOWEST_SHARE = 0.2
"""Of min-k %: the share of a document's tokens, the least likely ones, that is looked at."""

FOLDS = 5
FEWEST = 10
"""Members, and controls, below which nothing is said about telling them apart."""

CAVEAT = (
    "A goldfish mask does not protect membership: that a document was trained on shows in its loss even where none of "
    "it can be repeated."
)


@dataclass(frozen=True)
class Attack:
    """How well one score tells members: the area under the ROC curve, and true positives at few false ones."""

    auc: float
    auc_ci: tuple[float, float]
    tpr_at_1_percent_fpr: float | None
    tpr_at_0_1_percent_fpr: float | None

    def record(self) -> dict[str, Any]:
        return {**self.__dict__, "auc_ci": list(self.auc_ci)}


def membership_scores(scores: TokenScores, text: str | None, reference: TokenScores | None = None) -> dict[str, float]:
    """Every attack's score of one document; those that need what is missing (text, reference model) left out.

    loss: Yeom et al. 2018; zlib: Carlini et al. 2021; reference: Carlini et al. 2021; min-k %: Shi et al. 2024 (arXiv
    2310.16789); min-k %++: Zhang et al. 2024 (arXiv 2404.02936).
    """
    log_prob = scores.log_prob
    normalized = (log_prob - scores.mean) / np.sqrt(np.maximum(scores.variance, 1e-6))
    found = {
        "loss": float(log_prob.mean()),
        "min_k": _lowest(log_prob),
        "min_k_plus_plus": _lowest(normalized),
    }
    if text:
        found["zlib"] = float(log_prob.mean() / len(zlib.compress(text.encode())))
    if reference is not None:
        found["reference"] = float(log_prob.mean() - reference.log_prob.mean())
    return found


def attacks(
    members: Sequence[Mapping[str, float]], controls: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Every attack that all documents have a score for; none with fewer than ten members or controls."""
    if min(len(members), len(controls)) < FEWEST:
        return {}
    names = [name for name in members[0] if all(name in scores for scores in [*members, *controls])]
    found = {}
    for name in names:
        inside, outside = (np.array([scores[name] for scores in side]) for side in (members, controls))
        found[name] = Attack(
            auc(inside, outside),
            auc_interval(inside, outside),
            true_positive_rate(inside, outside, 0.01),
            true_positive_rate(inside, outside, 0.001),
        ).record()
    return found


def bag_of_words_guard(
    members: Sequence[NDArray[np.int64]], controls: Sequence[NDArray[np.int64]]
) -> dict[str, Any] | None:
    """How well members are told from controls by their words alone, without any model; None with too few documents.

    A naive Bayes classifier over token counts, cross-validated. Where it succeeds, the two differ in distribution, and
    a membership attack that succeeds may only have noticed that (Das et al. 2024, "Blind baselines", arXiv 2406.16201).
    """
    if min(len(members), len(controls)) < FEWEST:
        return None
    vocabulary, columns = np.unique(np.concatenate([*members, *controls]), return_inverse=True)
    lengths = [len(tokens) for tokens in [*members, *controls]]
    counts = np.zeros((len(lengths), len(vocabulary)))
    np.add.at(counts, (np.repeat(np.arange(len(lengths)), lengths), columns), 1)
    is_member = np.arange(len(lengths)) < len(members)
    fold = np.concatenate([np.arange(len(side)) % FOLDS for side in (members, controls)])
    score = np.empty(len(lengths))
    for number in range(FOLDS):
        seen = fold != number
        log_odds = _log_frequencies(counts[seen & is_member]) - _log_frequencies(counts[seen & ~is_member])
        score[~seen] = (counts[~seen] @ log_odds) / counts[~seen].sum(1)
    inside, outside = score[is_member], score[~is_member]
    low, high = auc_interval(inside, outside)
    return {"auc": auc(inside, outside), "auc_ci": [low, high], "differs": low > 0.5}


def _log_frequencies(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    total = counts.sum(0) + 1  # Laplace's smoothing
    return np.log(total / total.sum())


def _lowest(values: NDArray[np.float64]) -> float:
    count = max(1, int(LOWEST_SHARE * len(values)))
    return float(np.partition(values, count - 1)[:count].mean())
