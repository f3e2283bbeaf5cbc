"""The base class of all sections of the run file. It refuses unknown keys."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

Size = Annotated[int, Field(gt=0, le=2**31)]
"""The size of one tensor dimension. The product of two such sizes stays below 2^63."""
LARGEST = 2**63 - 1
"""Largest integer that torch and NumPy can represent."""
LONGEST_NAME, LONGEST_PATH = 240, 3500
"""Largest numbers of bytes in a file name (first) and in a path (second) that the user gives. File systems allow a
little more, but fourfold appends its own file names."""


class Strict(BaseModel):
    """A section that refuses unknown keys, NaN, and numbers written as strings."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True)

    @field_validator("*", mode="after")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"must be at most {LARGEST:,}")
        return value


def _possible_path(path: str) -> str:
    """Return the path. Raise ``ValueError`` if no file system can have such a path."""
    if "\0" in path:
        raise ValueError("a path cannot contain zero bytes")
    encoded = os.fsencode(path)
    if len(encoded) > LONGEST_PATH or any(len(name) > LONGEST_NAME for name in encoded.split(b"/")):
        raise ValueError(f"a path can have at most {LONGEST_PATH} bytes, and each name in it at most {LONGEST_NAME}")
    return path


PathText = Annotated[str, AfterValidator(_possible_path)]
"""The path of a file or folder, as text."""
