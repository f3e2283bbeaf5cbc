"""Membership inference: test whether a score separates documents that the model was trained on from unseen documents.

Documents that the model was trained on are called members, and unseen documents are called controls. Each attack has
its own score. The sign of the score is chosen so that members should have higher scores than controls.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fourfold.memorization.intervals import auc, auc_interval, true_positive_rate

if TYPE_CHECKING:  # ``scores`` imports torch. Reports import ATTACKS from this module, and must not wait for torch.
    from fourfold.memorization.scores import TokenScores

LOWEST_SHARE = 0.2
"""The attack min-k % uses only the least likely tokens of a document: this fraction of all its tokens."""

FOLDS, PERMUTATIONS = 5, 199
FEWEST = 10
"""Membership attacks need at least this many members and at least this many controls."""

ATTACKS = {
    "loss": "loss",
    "zlib": "loss / zlib length",
    "min_k": "min-k %",
    "min_k_plus_plus": "min-k %++",
    "reference": "reference model",
}
"""Names of the attacks, for display."""


def membership_scores(scores: TokenScores, text: str | None, reference: TokenScores | None = None) -> dict[str, float]:
    """Return the score that each membership attack gives to one document, by the attack's name.

    Args:
        scores: The audited model's scores of the document.
        text: The document's text. Without it, the attack "zlib" is skipped.
        reference: The reference model's scores of the document. Without them, the attack "reference" is skipped.

    Sources: loss, Yeom et al. 2018. zlib and reference, Carlini et al. 2021. min-k %, Shi et al. 2024 (arXiv
    2310.16789). min-k %++, Zhang et al. 2024 (arXiv 2404.02936).
    """
    log_prob = scores.log_prob
    normalized = (log_prob - scores.mean) / np.sqrt(np.maximum(scores.variance, 1e-6))
    found = {"loss": float(log_prob.mean()), "min_k": _lowest(log_prob), "min_k_plus_plus": _lowest(normalized)}
    if text:
        found["zlib"] = float(log_prob.mean() / len(zlib.compress(text.encode())))
    if reference is not None:
        found["reference"] = float(log_prob.mean() - reference.log_prob.mean())
    return found


def attacks(
    members: Sequence[Mapping[str, float]], controls: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return the results of each attack: the AUC with its interval, and the true-positive rates at low false-positive
    rates. Leave out an attack if it has no score for one of the documents.

    The result is empty if there are fewer than ``FEWEST`` members or fewer than ``FEWEST`` controls.

    Args:
        members: The ``membership_scores`` of each document that the model was trained on.
        controls: The ``membership_scores`` of each unseen document.
    """
    if min(len(members), len(controls)) < FEWEST:
        return {}
    names = [name for name in members[0] if all(name in scores for scores in [*members, *controls])]
    found = {}
    for name in names:
        inside, outside = (np.array([scores[name] for scores in side]) for side in (members, controls))
        found[name] = {
            "auc": auc(inside, outside),
            "auc_ci": list(auc_interval(inside, outside)),
            "tpr_at_1_percent_fpr": true_positive_rate(inside, outside, 100),
            "tpr_at_0_1_percent_fpr": true_positive_rate(inside, outside, 1000),
        }
    return found


def conclusion(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sentences that say which attacks can distinguish members from controls, judged by the intervals of their
    AUCs. ``found`` is the result of ``attacks``."""
    above = [ATTACKS[name] for name, attack in found.items() if attack["auc_ci"][0] > 0.5]
    below = [ATTACKS[name] for name, attack in found.items() if attack["auc_ci"][1] < 0.5]
    sentences = []
    if above:
        sentences.append(
            f"Members can be distinguished from controls by {', '.join(above)} (AUC's 95 % interval above 0.5). A "
            "goldfish mask does not protect membership: loss reveals it even if no text can be extracted."
        )
    if below:
        sentences.append(
            f"The result is inverted for {', '.join(below)} (AUC's 95 % interval below 0.5): members score lower than "
            "controls. This happens if members and controls come from different distributions."
        )
    if not sentences:
        sentences.append(
            "No evidence that members can be distinguished from controls: the 95 % interval of every AUC includes 0.5."
        )
    return " ".join(sentences)


def bag_of_words_guard(
    members: Sequence[NDArray[np.int64]], controls: Sequence[NDArray[np.int64]]
) -> dict[str, Any] | None:
    """Test whether token counts alone separate members from controls, without the model. Return None if there are too
    few distinct documents.

    The function cross-validates a naive Bayes classifier over the token counts of documents. If the classifier's AUC is
    higher than its AUC for 95 % of random permutations of the labels, members and controls have different
    distributions. Then a membership attack may detect nothing but this difference (Das et al. 2024, "Blind baselines",
    arXiv 2406.16201).

    Args:
        members: Token ids of each document that the model was trained on.
        controls: Token ids of each unseen document.
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
    """Return each distinct document once. If there were two copies of a document, one of them could be in the
    classifier's training data, and the other in its test data."""
    return list({tokens.tobytes(): tokens for tokens in documents}.values())


def _held_out_scores(
    counts: NDArray[np.float64], is_member: NDArray[np.bool_], fold: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the classifier's score of each document: the mean log-likelihood ratio of its tokens, members against
    controls. The token frequencies come from the documents of all other folds."""
    score = np.empty(len(counts))
    for number in range(FOLDS):
        seen = fold != number
        inside, outside = ((seen & side).astype(float) @ counts for side in (is_member, ~is_member))
        score[~seen] = (counts[~seen] @ (_log_frequencies(inside) - _log_frequencies(outside))) / counts[~seen].sum(1)
    return score


def _log_frequencies(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    frequencies: NDArray[np.float64] = (totals + 1) / (totals + 1).sum()  # Adding 1 is Laplace smoothing.
    return np.log(frequencies)


def _lowest(values: NDArray[np.float64]) -> float:
    count = max(1, int(LOWEST_SHARE * len(values)))
    return float(np.partition(values, count - 1)[:count].mean())
