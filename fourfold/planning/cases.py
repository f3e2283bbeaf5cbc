"""Cases: dataclasses of numbers or arrays, so that many layouts are predicted at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

Number = Any
"""A float, or an array of them with one entry for each case that is predicted at once."""


class Cases:
    """A dataclass of numbers or arrays [n] of them."""

    def take(self, index: np.ndarray) -> Self:
        """Select the cases at ``index``; scalars stay scalars."""
        arrays = {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray) and v.ndim}
        return replace(self, **{name: v[index] for name, v in arrays.items()})


def unique_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Index of each unique row of whole-number ``columns`` [n], and for every row the position of its equal there."""
    codes = np.zeros(np.shape(columns[0]), dtype=np.int64)
    for column in columns:
        if any(np.asarray(column).strides):  # a broadcast scalar distinguishes no rows
            codes = codes * (int(column.max()) + 1) + column.astype(np.int64)
    # Rows that follow each other are often equal, and finding them is quicker than sorting.
    begins = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    _, first, back = np.unique(codes[begins], return_index=True, return_inverse=True)
    return begins[first], np.repeat(back, np.diff(begins, append=len(codes)))
