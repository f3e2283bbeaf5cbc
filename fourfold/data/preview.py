"""A look at the masks of a run on its own data, before training: which tokens, how many, and what it will do."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.data.dataset import Samples
from fourfold.data.goldfish import Goldfish
from fourfold.data.mask_statistics import MaskStatistics, always, mask_statistics
from fourfold.data.masks import LossMask
from fourfold.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PreviewedSample:
    """One training sequence: [S] target tokens, whether each is trained, and whether the goldfish mask drops it."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    dropped: NDArray[np.bool_]

    def pieces(self, tokenizer: Tokenizer | None) -> list[str]:
        """The text of each token, its number where no tokenizer is known or the token is no whole character."""
        if tokenizer is None:
            return [f" {token}" for token in self.tokens.tolist()]
        return [_piece(tokenizer, token) for token in self.tokens.tolist()]


@dataclass(frozen=True)
class Preview:
    """Samples with their masks, and statistics over more of the data."""

    samples: list[PreviewedSample]
    trained_share: float
    """Share of the targets that are trained."""
    statistics: MaskStatistics | None
    """None without a goldfish mask."""


def preview(
    dataset: Samples, masks: Sequence[LossMask], goldfish: Goldfish | None, samples: int, tokens: int
) -> Preview:
    """The first `samples` training sequences, and statistics of about the first `tokens` tokens."""
    windows = dataset.read(np.arange(max(samples, 1, tokens // dataset.seq_length)))
    kept = np.ones(windows.tokens[:, 1:].shape, dtype=bool)
    for mask in masks:
        kept &= mask(windows)
    dropped = np.zeros_like(kept) if goldfish is None else ~always(goldfish)(windows)
    shown = [
        PreviewedSample(windows.tokens[row, 1:], kept[row] & ~dropped[row], kept[row] & dropped[row])
        for row in range(samples)
    ]
    statistics = None if goldfish is None else mask_statistics(windows, masks, goldfish)
    return Preview(shown, float((kept & ~dropped).mean()), statistics)


def _piece(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    return text if text and "�" not in text else f"⟨{token}⟩"
