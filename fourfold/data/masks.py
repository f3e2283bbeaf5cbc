"""Which tokens the loss counts: small functions, AND-ed.

A mask takes tokens and document numbers, both int64 [..., S + 1], and returns bool [..., S]: whether the prediction
of token i + 1 from token i is kept. It looks at whole windows, before the sequence or the batch is split, so that
every layout drops the same tokens. To add one, write such a function and name it where the loader is built.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fourfold.config.model import IGNORE_INDEX

LossMask = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]


def document_boundary(tokens: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Do not predict the first token of a document from the end of another."""
    return documents[..., 1:] == documents[..., :-1]


def labels_of(tokens: NDArray[np.int64], documents: NDArray[np.int64], masks: Sequence[LossMask]) -> NDArray[np.int64]:
    """[..., S]: the next token where every mask keeps it, else IGNORE_INDEX."""
    labels = tokens[..., 1:].copy()
    for mask in masks:
        labels[~mask(tokens, documents)] = IGNORE_INDEX
    return labels
