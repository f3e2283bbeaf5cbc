"""Parse JSON and TOML from untrusted sources. Every problem with the text raises a ValueError."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

TOO_DEEP = "its lists or tables are nested too deeply"


def parse_json(content: str | bytes) -> Any:
    """Parse a JSON text, and return its value.

    Raises:
        ValueError: The text is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text, and return its keys and values.

    Raises:
        ValueError: The text is not valid TOML, or is nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def dotted_keys(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table and of its subtables as ``section.key``, with their values."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from dotted_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
