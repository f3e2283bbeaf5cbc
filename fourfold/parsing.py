"""JSON and TOML that others wrote: whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
import tomllib
from typing import Any

TOO_DEEP = "its lists or tables are nested too deeply"


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text. Raises ``ValueError``."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ``ValueError``."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
