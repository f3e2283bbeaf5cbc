"""Measure the loss of a text, window by window."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.memorization.scorers import Scorer


@dataclass(frozen=True)
class ScoredWindow:
    """The tokens of a text that one forward pass scores together."""

    tokens: NDArray[np.int64]
    first: int
    """Index in ``tokens`` of the first token whose loss is measured. Earlier tokens only give context."""


def rolling_windows(tokens: NDArray[np.int64], before: int, context: int, overlap: int) -> list[ScoredWindow]:
    """Return windows that together predict every token exactly once.

    Each window has as many inputs as possible, so the last window may repeat more than ``overlap`` tokens. lm-eval's
    ``get_rolling_token_windows`` returns the same windows if its argument ``context_len`` is ``overlap``.

    Args:
        tokens: Token ids of the text [T].
        before: Id of the token that the first token of the text is predicted from. The first window starts with it.
        context: Maximum number of input tokens of a window.
        overlap: Number of tokens that each window repeats from the previous window.
    """
    stream = np.concatenate([[before], tokens])
    windows: list[ScoredWindow] = []
    begin = 1  # Index of the next token to predict.
    while begin < len(stream):
        stop = min(begin + (context if begin == 1 else context - overlap + 1), len(stream))
        start = max(0, stop - 1 - context)
        windows.append(ScoredWindow(stream[start:stop], begin - start))
        begin = stop
    return windows


def loss_of_text(model: Scorer, tokens: NDArray[np.int64], before: int, context: int, overlap: int) -> float | None:
    """Return the sum of the losses of a text's tokens, in nats. Each token is predicted once.

    All processes of the model's grid must call this. Only the first process gets the result. All other processes get
    None.

    Args:
        model: The model, which scores the windows of the text.
        tokens: Token ids of the text [T].
        before: Id of the token that the first token of the text is predicted from.
        context: Maximum number of input tokens per forward pass.
        overlap: Number of tokens that each window repeats from the previous window.
    """
    windows = rolling_windows(tokens, before, context, overlap)
    scores = model.score([window.tokens for window in windows])
    if scores is None:
        return None
    log_probs = [
        float(fields[0, window.first - 1 : len(window.tokens) - 1].astype(np.float64).sum())
        for window, fields in zip(windows, scores, strict=True)
    ]
    return -sum(log_probs)
