"""What can be extracted of a document: every measure from the scores of one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.data.mask_statistics import longest_run
from fourfold.memorization.scores import TokenScores


@dataclass(frozen=True)
class Extraction:
    """Of one document, for a suffix of S tokens.

    exact_match: greedy decoding after all tokens before the last S gives these (Carlini et al. 2023, arXiv 2202.07646);
    longest_span: most tokens in a row that greedy decoding repeats from the true text before them; token_agreement:
    share of all tokens that are the likeliest ones; extraction_strength: largest share of the document that greedy
    decoding completes to its end (Wang et al. 2025); log_p: ln of the chance to sample the suffix; first_divergence:
    place in the suffix of the first token that differs, None where it matches; loss: mean of -ln p, nats.
    """

    exact_match: bool
    longest_span: int
    token_agreement: float
    extraction_strength: float
    log_p: float
    first_divergence: int | None
    loss: float

    def queries(self, p: float) -> float:
        """Samples that an attacker must draw to see the suffix with probability p (Hayes et al., arXiv 2410.19482).

        n = ln(1 - p) / ln(1 - p_z) for the chance p_z of one sample; infinite where the scheme never draws it.
        """
        if self.log_p == -math.inf:
            return math.inf
        if self.log_p > -1e-12:
            return 1.0
        if self.log_p < -700:  # e^700 is about the largest number
            return math.inf
        # Below e^-30, 1 - p_z is 1 in floating point, and ln(1 - p_z) = -p_z.
        chance = math.exp(self.log_p)
        return max(1.0, math.log1p(-p) / (-chance if self.log_p < -30 else math.log1p(-chance)))


def extraction(scores: TokenScores, suffix: int) -> Extraction:
    """Measure one document, which has more than ``suffix`` tokens."""
    agrees = scores.agrees
    wrong = np.flatnonzero(~agrees)
    wrong_in_suffix = np.flatnonzero(~agrees[-suffix:])
    completed = len(agrees) - (int(wrong[-1]) + 1 if len(wrong) else 0)
    return Extraction(
        exact_match=len(wrong_in_suffix) == 0,
        longest_span=longest_run(agrees[None]),
        token_agreement=float(agrees.mean()),
        extraction_strength=completed / len(scores.tokens),
        log_p=float(scores.sampled[-suffix:].sum()),
        first_divergence=int(wrong_in_suffix[0]) if len(wrong_in_suffix) else None,
        loss=float(-scores.log_prob.mean()),
    )


def matches_after(scores: TokenScores, prefix: int, suffix: int) -> bool | None:
    """Whether greedy decoding after the first ``prefix`` tokens gives the next ``suffix``; None without as many."""
    if prefix + suffix > len(scores.tokens):
        return None
    return bool(scores.agrees[prefix - 1 : prefix - 1 + suffix].all())


def prefix_lengths(documents: Sequence[TokenScores], suffix: int) -> list[int]:
    """1, 2, 4, … and 50, as far as some document is long enough."""
    longest = max(len(document.tokens) for document in documents) - suffix
    doubling = [2**power for power in range(longest.bit_length())]
    return sorted({length for length in [*doubling, 50] if 1 <= length <= longest})


def exposure(loss: float, control_losses: Sequence[float]) -> float:
    """log2(N) - log2(rank) of a canary among itself and N - 1 controls, by loss (Carlini et al., arXiv 1802.08232).

    At most log2(N): to see more, give more controls.
    """
    rank = 1 + sum(other < loss for other in control_losses)
    return math.log2(len(control_losses) + 1) - math.log2(rank)
