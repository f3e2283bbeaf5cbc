"""Continue text greedily, token by token, and compare the result with the true text."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from fourfold.memorization.intervals import mean_with_interval
from fourfold.memorization.scorers import Scorer


def continue_greedily(scorer: Scorer, documents: Sequence[NDArray[np.int64]], suffix: int) -> list[NDArray[np.int64]]:
    """Replace the last ``suffix`` tokens of each document by greedy decoding, and return the new tokens.

    Every process of the model's grid must call this. Each new token takes one forward pass over the whole text. There
    is no cache, so this works on any grid.
    """
    texts = [document[:-suffix] for document in documents]
    for _ in range(suffix):
        # A pass scores the prediction of each token in its input. To get a prediction of the next token, append a 0 in
        # its place.
        fields = scorer.score([np.append(text, 0) for text in texts])
        new = [0] * len(texts)
        if fields is not None:  # Drop the columns of padding.
            new = [int(of_text[1, len(text) - 1]) for of_text, text in zip(fields, texts, strict=True)]
        if dist.is_initialized():
            dist.broadcast_object_list(new, src=0)
        texts = [np.append(text, token) for text, token in zip(texts, new, strict=True)]
    return [text[-suffix:] for text in texts]


def text_likeness(generated: Sequence[NDArray[np.int64]], true: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Return the means over documents of ROUGE-L (F1), edit similarity, and longest common span of token ids, with
    intervals.

    ROUGE-L uses the longest common subsequence (Lin 2004). Edit similarity is 1 - Levenshtein distance / length.
    """
    pairs = list(zip(generated, true, strict=True))
    measures: dict[str, Sequence[float]] = {
        "rouge_l": [2 * common_subsequence(a, b) / (len(a) + len(b)) for a, b in pairs],
        "edit_similarity": [1 - edit_distance(a, b) / max(len(a), len(b)) for a, b in pairs],
        "longest_common_span": [common_span(a, b) for a, b in pairs],
        "exact_match": [float(np.array_equal(a, b)) for a, b in pairs],
    }
    return {"documents": len(pairs), **{name: mean_with_interval(values) for name, values in measures.items()}}


def common_subsequence(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the length of the longest common subsequence."""
    row = np.zeros(len(b) + 1, dtype=np.int64)
    for token in a:
        # First compute best[j] = max(row[j], row[j-1] + match). Then the running maximum also includes best[j-1].
        best = row.copy()
        best[1:] = np.maximum(row[1:], row[:-1] + (b == token))
        row = np.maximum.accumulate(best)
    return int(row[-1])


def common_span(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the length of the longest run of tokens that both contain."""
    return SequenceMatcher(None, a.tolist(), b.tolist(), autojunk=False).find_longest_match().size


def edit_distance(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the Levenshtein distance: the smallest number of insertions, deletions, and substitutions."""
    places = np.arange(len(b) + 1)
    row = places.copy()
    for number, token in enumerate(a, start=1):
        cost = np.empty_like(row)
        cost[0] = number
        cost[1:] = np.minimum(row[1:] + 1, row[:-1] + (b != token))
        row = np.minimum.accumulate(cost - places) + places  # Each additional column costs one more insertion.
    return int(row[-1])
