"""Measure how much of a document can be extracted. All measures come from the scores of one forward pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.data.mask_preview import longest_run
from fourfold.memorization.intervals import wilson
from fourfold.memorization.scores import TokenScores


@dataclass(frozen=True)
class Extraction:
    """The measures of one document and of its suffix, which is a given number of tokens at its end."""

    exact_match: bool
    """Whether greedy decoding after all tokens before the suffix produces the suffix (Carlini et al. 2023, arXiv
    2202.07646)."""
    longest_span: int
    """Length of the longest run of tokens that the model predicts correctly. A token is predicted correctly if it is
    the most likely one, given the true text before it."""
    token_agreement: float
    """Fraction of the document's tokens that the model predicts correctly."""
    extraction_strength: float
    """Length of the longest suffix of the document that greedy decoding reproduces from the text before it, divided by
    the document's length (Wang et al. 2025)."""
    log_p: float
    """ln of the probability that a sample is exactly the suffix, if the sample continues the text before the suffix."""
    loss: float
    """Mean of -ln p over the document's tokens, in nats. p is the model's probability of a token."""

    def queries(self, p: float) -> float:
        """Return how many samples n an attacker must draw, so that at least one sample is the suffix with probability p
        (Hayes et al., arXiv 2410.19482).

        n = ln(1 - p) / ln(1 - p_z), where p_z is the probability that one sample is the suffix. The result is
        infinite if p_z is below e^-700.
        """
        if self.log_p > -1e-12:
            return 1.0
        # n is about 1 / p_z, and e^700 is close to the largest float.
        if self.log_p < -700:
            return math.inf
        # If p_z is below e^-30, then 1 - p_z rounds to 1, so use ln(1 - p_z) ≈ -p_z.
        chance = math.exp(self.log_p)
        return max(1.0, math.log1p(-p) / (-chance if self.log_p < -30 else math.log1p(-chance)))


def extraction(scores: TokenScores, suffix: int) -> Extraction:
    """Measure one document. Its last ``suffix`` tokens are the suffix, and it must have more tokens than that."""
    agrees = scores.agrees
    wrong = np.flatnonzero(~agrees)
    completed = len(agrees) - (int(wrong[-1]) + 1 if len(wrong) else 0)
    return Extraction(
        exact_match=completed >= suffix,
        longest_span=longest_run(agrees[None]),
        token_agreement=float(agrees.mean()),
        extraction_strength=completed / len(scores.tokens),
        log_p=float(scores.sampled[-suffix:].sum()),
        loss=float(-scores.log_prob.mean()),
    )


def matches_after(scores: TokenScores, prefix: int, suffix: int) -> bool | None:
    """Return whether greedy decoding after the first ``prefix`` tokens produces the next ``suffix`` tokens.

    Return None if the document has too few tokens.
    """
    if prefix + suffix > len(scores.tokens):
        return None
    return bool(scores.agrees[prefix - 1 : prefix - 1 + suffix].all())


def match_rate(matches: Sequence[bool]) -> dict[str, Any]:
    """Return the number of documents, and the fraction of documents that match with its interval, as JSON values."""
    exact = sum(matches)
    return {
        "documents": len(matches),
        "exact_match": exact / len(matches),
        "exact_match_ci": list(wilson(exact, len(matches))),
    }


def prefix_lengths(documents: Sequence[TokenScores], suffix: int) -> list[int]:
    """Return the prefix lengths 1, 2, 4, 8, …, and 50, in order. Leave out lengths if even the longest document has
    fewer than ``suffix`` tokens after such a prefix."""
    longest = max(len(document.tokens) for document in documents) - suffix
    doubling = [2**power for power in range(longest.bit_length())]
    return sorted({length for length in [*doubling, 50] if 1 <= length <= longest})


def exposure(loss: float, control_losses: Sequence[float]) -> float:
    """Return the exposure of a canary: log2(N) - log2(rank). The canary and N - 1 controls are ranked by loss, lowest
    first (Carlini, arXiv 1802.08232).

    The result is at most log2(N), so more controls raise the limit.
    """
    rank = 1 + sum(other < loss for other in control_losses)
    return math.log2(len(control_losses) + 1) - math.log2(rank)
