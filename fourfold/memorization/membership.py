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

FOLDS, PERMUTATIONS = 5, 199
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
            true_positive_rate(inside, outside, 100),
            true_positive_rate(inside, outside, 1000),
        ).record()
    return found


def bag_of_words_guard(
    members: Sequence[NDArray[np.int64]], controls: Sequence[NDArray[np.int64]]
) -> dict[str, Any] | None:
    """How well members are told from controls by their words alone, without any model; None with too few documents.

    A naive Bayes classifier over token counts, cross-validated over different documents. Where it succeeds, better than
    on all but one in twenty random ways of calling as many of them members, the two differ in distribution, and a
    membership attack that succeeds may only have noticed that (Das et al. 2024, "Blind baselines", arXiv 2406.16201).
    """
    members, controls = _different(members), _different(controls)
    if min(len(members), len(controls)) < FEWEST:
        return None
    documents = [*members, *controls]
    vocabulary, columns = np.unique(np.concatenate(documents), return_inverse=True)
    lengths = [len(tokens) for tokens in documents]
    counts = np.zeros((len(documents), len(vocabulary)))
    np.add.at(counts, (np.repeat(np.arange(len(documents)), lengths), columns), 1)
    generator = np.random.default_rng(0)
    fold = generator.permutation(len(documents)) % FOLDS
    is_member = np.arange(len(documents)) < len(members)
    score = _held_out_scores(counts, is_member, fold)
    found = auc(score[is_member], score[~is_member])
    above = 0
    for _ in range(PERMUTATIONS):
        called = generator.permutation(is_member)
        score_of_others = _held_out_scores(counts, called, fold)
        above += auc(score_of_others[called], score_of_others[~called]) >= found
    p_value = (1 + above) / (1 + PERMUTATIONS)
    interval = auc_interval(score[is_member], score[~is_member])
    return {"auc": found, "auc_ci": list(interval), "p_value": p_value, "differs": p_value <= 0.05}


def _different(documents: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Each document once: a copy on both sides of a fold would be recognized, not its words."""
    return list({tokens.tobytes(): tokens for tokens in documents}.values())


def _held_out_scores(
    counts: NDArray[np.float64], is_member: NDArray[np.bool_], fold: NDArray[np.int64]
) -> NDArray[np.float64]:
    """How much more likely each document's words are a member's, by the documents of the other folds."""
    score = np.empty(len(counts))
    for number in range(FOLDS):
        seen = fold != number
        inside, outside = ((seen & side).astype(float) @ counts for side in (is_member, ~is_member))
        score[~seen] = (counts[~seen] @ (_log_frequencies(inside) - _log_frequencies(outside))) / counts[~seen].sum(1)
    return score


def _log_frequencies(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log((totals + 1) / (totals + 1).sum())  # Laplace's smoothing


def _lowest(values: NDArray[np.float64]) -> float:
    count = max(1, int(LOWEST_SHARE * len(values)))
    return float(np.partition(values, count - 1)[:count].mean())
