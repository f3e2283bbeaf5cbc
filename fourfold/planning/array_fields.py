"""Dataclasses whose fields are numbers or arrays. With arrays, one call can predict many layouts. The code calls each
of them a *case*."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np

Number = float | np.ndarray
"""A number, or an array [n] with one number for each of n cases that are predicted together."""
Flag = bool | np.bool_ | np.ndarray
"""A boolean, or an array [n] of booleans."""


@dataclass(frozen=True)
class ArrayFields:
    """A dataclass whose fields are numbers, arrays [n], or further ``ArrayFields``."""

    def map_arrays(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Return a copy with ``change`` applied to every array. Scalars are kept."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, ArrayFields):
                changed[name] = value.map_arrays(change)
            elif isinstance(value, np.ndarray) and value.ndim:
                changed[name] = change(value)
        return replace(self, **changed)

    def take(self, index: np.ndarray | slice) -> Self:
        """Select the cases at ``index``."""
        return self.map_arrays(lambda array: array[index])

    def followed_by(self, more: Self) -> Self:
        """Return these cases, followed by the cases of ``more``. Scalars must be the same in both."""
        joined: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, ArrayFields):
                joined[name] = value.followed_by(getattr(more, name))
            elif isinstance(value, np.ndarray) and value.ndim:
                joined[name] = np.concatenate([value, getattr(more, name)])
        return replace(self, **joined)

    def with_float_arrays(self) -> Self:
        """Return a copy with arrays of integers converted to floats."""
        return self.map_arrays(lambda array: array.astype(float) if array.dtype.kind == "i" else array)


SomeArrayFields = TypeVar("SomeArrayFields", bound=ArrayFields)


def stack(cases: Sequence[SomeArrayFields]) -> SomeArrayFields:
    """Stack single cases into arrays.

    Numbers become arrays (bool if the field's default is bool). Other fields are taken from the first case.
    """
    columns: dict[str, Any] = {}
    for field in fields(cases[0]):
        values = [getattr(case, field.name) for case in cases]
        if isinstance(values[0], ArrayFields):
            columns[field.name] = stack(values)
        elif field.type in ("Number", "Flag"):
            columns[field.name] = np.array(values, dtype=bool if isinstance(field.default, bool) else float)
    return replace(cases[0], **columns)


def unique_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Find the unique rows in integer ``columns`` [n]. Return the indices of the unique rows, and for every row its
    position among the unique rows."""
    codes, numbers = np.zeros(np.shape(columns[0]), dtype=np.int64), 1
    for column in columns:
        if any(np.asarray(column).strides):  # Skip a broadcast scalar, because it is equal in all rows.
            values = int(column.max()) + 1
            if numbers * values >= 2**63:
                kinds, codes = np.unique(codes, return_inverse=True)
                numbers = len(kinds)
            codes, numbers = codes * values + column.astype(np.int64), numbers * values
    # Consecutive rows are often equal. Finding these first is quicker than sorting all rows.
    begins = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    _, first, back = np.unique(codes[begins], return_index=True, return_inverse=True)
    return begins[first], np.repeat(back, np.diff(begins, append=len(codes)))
