"""Measure a text's perplexity, loss, and bits per byte. Bits per byte are comparable between models with different
tokenizers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.memorization.scorers import Scorer


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a text."""

    tokens: int
    bytes: int
    nats: float
    """Sum of the losses of all tokens, in nats. Each token is predicted once."""

    @property
    def loss(self) -> float:
        """Return the loss in nats per token."""
        return self.nats / self.tokens

    def record(self) -> dict[str, float]:
        """Return the measures as JSON values."""
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "perplexity": math.exp(min(self.loss, 700.0)),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
        }


@dataclass(frozen=True)
class ScoredWindow:
    """The tokens of one forward pass."""

    tokens: NDArray[np.int64]
    first: int
    """Index of the first token whose loss is measured. Earlier tokens only give context."""


def rolling_windows(tokens: NDArray[np.int64], before: int, context: int, overlap: int) -> list[ScoredWindow]:
    """Return windows that together predict every token exactly once.

    The first window starts with the token ``before``, and each later window repeats ``overlap`` tokens. A window has at
    most ``context`` inputs. Each window has as many inputs as possible, so the last window may repeat more than
    ``overlap`` tokens. lm-eval's ``get_rolling_token_windows`` returns the same windows, if its argument
    ``context_len`` is ``overlap``.
    """
    stream = np.concatenate([[before], tokens])
    windows: list[ScoredWindow] = []
    begin = 1  # This is the index of the next token to predict.
    while begin < len(stream):
        stop = min(begin + (context if begin == 1 else context - overlap + 1), len(stream))
        start = max(0, stop - 1 - context)
        windows.append(ScoredWindow(stream[start:stop], begin - start))
        begin = stop
    return windows


def perplexity(
    model: Scorer, tokens: NDArray[np.int64], text_bytes: int, before: int, context: int, overlap: int
) -> Perplexity | None:
    """Measure the perplexity of a tokenized text on the model's grid.

    All processes of the grid call this. Only the first process gets the result, and all other processes get None.
    """
    windows = rolling_windows(tokens, before, context, overlap)
    scores = model.score([window.tokens for window in windows])
    if scores is None:
        return None
    log_probs = [
        float(fields[0, window.first - 1 : len(window.tokens) - 1].astype(np.float64).sum())
        for window, fields in zip(windows, scores, strict=True)
    ]
    return Perplexity(len(tokens), text_bytes, -sum(log_probs))
