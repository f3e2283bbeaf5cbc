"""A window of the token stream as a packing of documents: which document each token is of, and its place in it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def documents_of(starts: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """[len(starts), length]: 0, 1, 2 … within each window, given where documents start in it (any order, repeats)."""
    is_start = np.zeros((len(starts), length), dtype=np.int64)
    for row, places in enumerate(starts):
        is_start[row, places] = 1
    is_start[:, 0] = 0  # the first document is number 0, whether it starts there or before
    return is_start.cumsum(axis=1)


def positions_of(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows, length]: each token's place in its document, counted from the window's start in the first one."""
    places = np.arange(documents.shape[1])
    is_start = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
