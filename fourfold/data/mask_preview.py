"""Preview a run's masks on its own data before training: which tokens the masks leave out, and how many."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.config.model import IGNORE_INDEX
from fourfold.data.dataset import Samples
from fourfold.data.goldfish import Goldfish
from fourfold.data.masks import LossMask, labels_of
from fourfold.data.tokenizer import Tokenizer

RATE_TOLERANCE = 0.2
"""Warn if the drop rate differs from 1/k by more than this fraction of 1/k."""
SPAN_FACTOR = 3.0
"""Warn if the longest span without a dropped token is more than this many times as long as expected by chance."""

_FEWEST_TOKENS = 1_000  # With fewer tokens, chance alone could cause a warning.


@dataclass(frozen=True)
class MaskStatistics:
    """Statistics of the goldfish mask over some windows of the training data. A target is a token to predict."""

    k: int
    """The mask drops about one target in k."""
    tokens: int
    """Number of targets."""
    trainable: int
    """Number of targets that all masks except goldfish keep."""
    dropped: int
    """Number of trainable targets that the goldfish mask drops."""
    longest_undropped_span: int
    """Length of the longest run of trainable targets that the goldfish mask keeps. The end of a document also ends a
    run."""

    @property
    def drop_rate(self) -> float:
        """Return the fraction of the trainable targets that the goldfish mask drops."""
        return self.dropped / self.trainable if self.trainable else 0.0

    @property
    def expected_longest_span(self) -> float:
        """Return how long the longest span without a dropped target would be if drops were independent: for n trainable
        targets, about ln(n/k) / -ln(1 - 1/k)."""
        return math.log(max(self.trainable / self.k, math.e)) / -math.log1p(-1 / self.k)

    def warnings(self) -> list[str]:
        """Return a warning if the drop rate is far from 1/k, and a warning if the longest span is too long."""
        found = []
        if self.trainable >= _FEWEST_TOKENS and abs(self.drop_rate * self.k - 1) > RATE_TOLERANCE:
            found.append(
                f"the goldfish mask drops {self.drop_rate:.2%} of the trained tokens, not 1/{self.k} = "
                f"{1 / self.k:.2%}: its hash does not suit this data, or documents are short compared to h; "
                "try strategy = 'hash', or a smaller h"
            )
        if self.longest_undropped_span > SPAN_FACTOR * self.expected_longest_span:
            found.append(
                f"the goldfish mask keeps {self.longest_undropped_span} tokens in a row, but chance would keep about "
                f"{self.expected_longest_span:.0f}, so such a passage can be memorized; repetitive text causes this, "
                "and so does an h that is large compared to the documents"
            )
        return found

    def record(self) -> dict[str, int | float]:
        """Return the statistics by name, as JSON values."""
        return {**asdict(self), "drop_rate": self.drop_rate, "expected_longest_span": self.expected_longest_span}


@dataclass(frozen=True)
class PreviewedSample:
    """One training sequence: the target tokens [S], which of them are trained, and which of them the goldfish mask
    drops."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    dropped: NDArray[np.bool_]

    def pieces(self, tokenizer: Tokenizer | None) -> list[str]:
        """Return the text of each token.

        If the tokenizer is unknown, or if a token does not decode to complete characters, the text is the token's id.
        Special tokens never decode to characters.
        """
        if tokenizer is None:
            return [f" {token}" for token in self.tokens.tolist()]
        texts = [tokenizer.decode([token]) for token in self.tokens.tolist()]
        return [
            text if text and "\ufffd" not in text else f"⟨{token}⟩"
            for text, token in zip(texts, self.tokens.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Preview:
    """A few samples with their masks, and statistics over more samples."""

    samples: list[PreviewedSample]
    trained_share: float
    """Fraction of the targets that are trained."""
    statistics: MaskStatistics | None
    """Statistics of the goldfish mask. None if the run has no goldfish mask."""


def preview(
    dataset: Samples, masks: Sequence[LossMask], goldfish: Goldfish | None, samples: int, tokens: int
) -> Preview:
    """Preview the masks at the beginning of the training data. The goldfish mask applies even before its start step.

    Args:
        dataset: The samples of the run, in training order.
        masks: All masks except goldfish.
        goldfish: The goldfish mask, if there is one.
        samples: Number of training sequences to return.
        tokens: Approximate number of tokens for the statistics.
    """
    windows = dataset.read(np.arange(max(samples, 1, tokens // dataset.seq_length)))
    kept = labels_of(windows, masks) != IGNORE_INDEX
    dropped, statistics = np.zeros_like(kept), None
    if goldfish is not None:
        from_first_step = Goldfish(goldfish.config, goldfish.exempt)
        dropped = kept & ~from_first_step(windows)
        # A span ends at a dropped token, at the end of a document, or at a token that another mask leaves out.
        span = longest_run(kept & ~dropped)
        statistics = MaskStatistics(goldfish.config.k, kept.size, int(kept.sum()), int(dropped.sum()), span)
    trained = kept & ~dropped
    shown = [PreviewedSample(windows.tokens[row, 1:], trained[row], dropped[row]) for row in range(samples)]
    return Preview(shown, float(trained.mean()), statistics)


def longest_run(flags: NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True within any row."""
    places = np.arange(1, flags.shape[-1] + 1)
    ending_here = places - np.maximum.accumulate(np.where(flags, 0, places), axis=-1)
    return int(ending_here.max(initial=0))
