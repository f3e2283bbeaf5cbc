"""Continue text greedily, token by token, and compare the result with the true text."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from fourfold.data.transformers_tokenizer import AnyTokenizer
from fourfold.memorization.documents import Tokens
from fourfold.memorization.intervals import mean_with_interval, wilson
from fourfold.memorization.scorers import Scorer

APPROXIMATE = 0.1
"""A continuation matches approximately if its edit distance from the true text is at most this fraction of its length.
The reports on Gemma and Gemini use the same limit."""


def continue_greedily(scorer: Scorer, documents: Sequence[NDArray[np.int64]], suffix: int) -> list[NDArray[np.int64]]:
    """Remove the last ``suffix`` tokens of each document, and generate the same number of tokens greedily. Return the
    generated tokens.

    Every process of the model's grid must call this. Each new token takes one forward pass over the whole text. There
    is no cache, so the function works on any grid.

    Args:
        scorer: The model.
        documents: Token ids of each document [T].
        suffix: Number of tokens to generate.
    """
    texts = [document[:-suffix] for document in documents]
    for _ in range(suffix):
        # A pass scores each token of its input except the first. Append a 0, so that the pass also scores the position
        # after the text.
        fields = scorer.score([np.append(text, 0) for text in texts], last=1)
        new = [0] * len(texts)
        if fields is not None:
            new = [int(of_text[1, -1]) for of_text in fields]
        if dist.is_initialized():
            dist.broadcast_object_list(new, src=0)
        texts = [np.append(text, token) for text, token in zip(texts, new, strict=True)]
    return [text[-suffix:] for text in texts]


def text_likeness(
    generated: Sequence[NDArray[np.int64]], true: Sequence[NDArray[np.int64]], edits: Sequence[int]
) -> dict[str, Any]:
    """Compare generated texts with the true texts, by their token ids. Return the mean of each measure over the
    documents, with its interval.

    The measures are ROUGE-L (F1), edit similarity, longest common span, exact match, and approximate match. ROUGE-L
    uses the longest common subsequence (Lin 2004). Edit similarity is 1 - Levenshtein distance / length. A document
    matches approximately if its distance is at most 10 % of the length (``APPROXIMATE``).

    Args:
        generated: Token ids of each generated text.
        true: Token ids of each true text.
        edits: For each document, the ``edit_distance`` between both texts.
    """
    pairs = list(zip(generated, true, strict=True))
    edited = [distance / max(len(a), len(b)) for distance, (a, b) in zip(edits, pairs, strict=True)]
    measures: dict[str, Sequence[float]] = {
        "rouge_l": [2 * common_subsequence(a, b) / (len(a) + len(b)) for a, b in pairs],
        "edit_similarity": [1 - share for share in edited],
        "longest_common_span": [common_span(a, b) for a, b in pairs],
        "exact_match": [float(np.array_equal(a, b)) for a, b in pairs],
    }
    approximate = sum(share <= APPROXIMATE for share in edited)
    return {
        "documents": len(pairs),
        **{name: mean_with_interval(values) for name, values in measures.items()},
        "approximate_match": approximate / len(pairs),
        "approximate_match_ci": list(wilson(approximate, len(pairs))),
    }


def passage(prefix: Tokens, true: Tokens, written: Tokens, tokenizer: AnyTokenizer) -> Any:
    """Return one entry of the list "passages" in an audit's record.

    The entry has the end of the prefix (as many tokens as the true continuation has), the true continuation, and the
    model's continuation. Each continuation is a list of pieces. A piece is a text and a flag. The flag is True if both
    continuations have this text.

    Args:
        prefix: Token ids before the continuations.
        true: Token ids of the true continuation.
        written: Token ids of the model's continuation.
        tokenizer: Decodes the tokens.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    for kind, *ends in SequenceMatcher(None, true.tolist(), written.tolist(), autojunk=False).get_opcodes():
        for side, tokens, begin, end in zip(sides, (true, written), ends[::2], ends[1::2], strict=True):
            if end > begin:
                side.append([tokenizer.decode(tokens[begin:end].tolist()), kind == "equal"])
    return {"before": tokenizer.decode(prefix[-len(true) :].tolist()), "true": sides[0], "written": sides[1]}


def common_subsequence(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the length of the longest common subsequence of two lists of token ids."""
    row = np.zeros(len(b) + 1, dtype=np.int64)
    for token in a:
        # best[j] = max(row[j], row[j-1] + match, best[j-1]). The running maximum below adds the term best[j-1].
        best = row.copy()
        best[1:] = np.maximum(row[1:], row[:-1] + (b == token))
        row = np.maximum.accumulate(best)
    return int(row[-1])


def common_span(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the length of the longest run of consecutive tokens that ``a`` and ``b`` both contain."""
    return SequenceMatcher(None, a.tolist(), b.tolist(), autojunk=False).find_longest_match().size


def edit_distance(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Return the Levenshtein distance: the smallest number of insertions, deletions, and substitutions of tokens that
    turn ``a`` into ``b``."""
    places = np.arange(len(b) + 1)
    row = places.copy()
    for number, token in enumerate(a, start=1):
        cost = np.empty_like(row)
        cost[0] = number
        cost[1:] = np.minimum(row[1:] + 1, row[:-1] + (b != token))
        row = np.minimum.accumulate(cost - places) + places  # Each step to the right in a row is one insertion.
    return int(row[-1])
