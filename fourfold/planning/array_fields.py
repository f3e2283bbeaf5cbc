"""Define dataclasses whose fields are scalars or arrays. If the arrays have n entries, one call of a cost function
predicts n *cases*, such as n layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, get_type_hints

import numpy as np

Number = float | np.ndarray
"""A scalar, or an array [n] with one entry per case."""
Flag = bool | np.bool_ | np.ndarray
"""A boolean, or an array [n] with one boolean per case."""


@dataclass(frozen=True)
class ArrayFields:
    """A dataclass whose fields are scalars, arrays [n], or nested ``ArrayFields``. Fields of other types, such as
    names, are the same for all cases."""

    def map_arrays(self, change: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Return a copy with ``change`` applied to every array, also in nested ``ArrayFields``. All other values are
        copied without a change."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, ArrayFields):
                changed[name] = value.map_arrays(change)
            elif isinstance(value, np.ndarray) and value.ndim:
                changed[name] = change(value)
        return replace(self, **changed)

    def take(self, index: np.ndarray | slice) -> Self:
        """Return a copy with only the cases at ``index``."""
        return self.map_arrays(lambda array: array[index])

    def followed_by(self, more: Self) -> Self:
        """Return a copy in which the cases of ``more`` follow the cases of ``self``. Values that are not arrays come
        from ``self``, so these values must be equal in ``self`` and ``more``."""
        joined: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, ArrayFields):
                joined[name] = value.followed_by(getattr(more, name))
            elif isinstance(value, np.ndarray) and value.ndim:
                joined[name] = np.concatenate([value, getattr(more, name)])
        return replace(self, **joined)

    def with_float_arrays(self) -> Self:
        """Return a copy with all integer arrays converted to float64."""
        return self.map_arrays(lambda array: array.astype(float) if array.dtype.kind == "i" else array)


SomeArrayFields = TypeVar("SomeArrayFields", bound=ArrayFields)


def stack(cases: Sequence[SomeArrayFields]) -> SomeArrayFields:
    """Stack single cases into arrays [n].

    Fields of type ``Number`` and ``Flag`` become arrays of floats, or of booleans if the field's default is a boolean.
    All other fields come from the first case.
    """
    columns: dict[str, Any] = {}
    types = get_type_hints(type(cases[0]))  # ``field.type`` may be a string, so use the resolved type hints.
    for field in fields(cases[0]):
        values = [getattr(case, field.name) for case in cases]
        if isinstance(values[0], ArrayFields):
            columns[field.name] = stack(values)
        elif types[field.name] in (Number, Flag):
            columns[field.name] = np.array(values, dtype=bool if isinstance(field.default, bool) else float)
    return replace(cases[0], **columns)


def unique_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Find the unique rows of a table. ``columns`` has the columns of the table, each an array [n] of nonnegative
    integers.

    Returns:
        Two arrays. The first has the index of each unique row's first occurrence. The second [n] has, for each row of
        the table, the position of its unique row in the first array.
    """
    codes, numbers = np.zeros(np.shape(columns[0]), dtype=np.int64), 1
    for column in columns:
        # A broadcast scalar has strides of 0. It is equal in all rows, so skip it.
        if any(np.asarray(column).strides):
            values = int(column.max()) + 1
            if numbers * values >= 2**63:
                kinds, codes = np.unique(codes, return_inverse=True)
                numbers = len(kinds)
            codes, numbers = codes * values + column.astype(np.int64), numbers * values
    # Consecutive rows are often equal. So sort only the first row of each run of equal rows.
    begins = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    _, first, back = np.unique(codes[begins], return_index=True, return_inverse=True)
    return begins[first], np.repeat(back, np.diff(begins, append=len(codes)))
