"""Greedy continuation, token by token, and how near it comes to the true text: for the measures that need the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from fourfold.memorization.forward import AuditedModel
from fourfold.memorization.statistics import bootstrap


def continue_greedily(
    model: AuditedModel, documents: Sequence[NDArray[np.int64]], suffix: int
) -> list[NDArray[np.int64]]:
    """The `suffix` tokens that greedy decoding puts after each document without its last `suffix`.

    Every process of the model's grid must call this. Each new token is a pass over all: no cache, but any layout.
    """
    texts = [document[:-suffix] for document in documents]
    for _ in range(suffix):
        # A pass says what is likeliest in the place of each token, so there must be one; its value is never an input.
        fields = model.score([np.append(text, 0) for text in texts])
        new = [None] * len(texts) if fields is None else [int(of_text[1, -1]) for of_text in _cut(fields, texts)]
        if dist.is_initialized():
            dist.broadcast_object_list(new, src=0)
        texts = [np.append(text, token) for text, token in zip(texts, new, strict=True)]
    return [text[-suffix:] for text in texts]


def _cut(fields: Sequence[NDArray[np.float32]], texts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """Without the columns of padding."""
    return [of_text[:, : len(text)] for of_text, text in zip(fields, texts, strict=True)]


def text_likeness(generated: Sequence[NDArray[np.int64]], true: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Means over documents, on token ids, with intervals: ROUGE-L (F1), edit similarity, longest common span.

    ROUGE-L: longest common subsequence (Lin 2004); edit similarity: 1 - Levenshtein distance / length.
    """
    pairs = list(zip(generated, true, strict=True))
    measures = {
        "rouge_l": [2 * common_subsequence(a, b) / (len(a) + len(b)) for a, b in pairs],
        "edit_similarity": [1 - edit_distance(a, b) / max(len(a), len(b)) for a, b in pairs],
        "longest_common_span": [common_span(a, b) for a, b in pairs],
        "exact_match": [float(np.array_equal(a, b)) for a, b in pairs],
    }
    found: dict[str, Any] = {"documents": len(pairs)}
    for name, values in measures.items():
        array = np.array(values, dtype=np.float64)
        found[name] = {"mean": float(array.mean()), "ci": list(bootstrap(lambda rows: float(rows.mean()), array))}
    return found


def common_subsequence(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the longest common subsequence."""
    row = np.zeros(len(b) + 1, dtype=np.int64)
    for token in a:
        # best[j] = max(row[j], row[j-1] + match); a running maximum carries the third case, best[j-1].
        best = row.copy()
        best[1:] = np.maximum(row[1:], row[:-1] + (b == token))
        row = np.maximum.accumulate(best)
    return int(row[-1])


def common_span(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the longest run of tokens that stands in both."""
    row, longest = np.zeros(len(b) + 1, dtype=np.int64), 0
    for token in a:
        row[1:] = np.where(b == token, row[:-1] + 1, 0)
        longest = max(longest, int(row.max()))
    return longest


def edit_distance(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Levenshtein distance: fewest insertions, deletions and substitutions."""
    places = np.arange(len(b) + 1)
    row = places.copy()
    for number, token in enumerate(a, start=1):
        cost = np.empty_like(row)
        cost[0] = number
        cost[1:] = np.minimum(row[1:] + 1, row[:-1] + (b != token))
        row = np.minimum.accumulate(cost - places) + places  # insertions: one more for each place
    return int(row[-1])
