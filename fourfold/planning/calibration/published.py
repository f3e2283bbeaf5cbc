"""Read the published figures of large runs that come with fourfold."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def published_table() -> dict[str, Any]:
    return tomllib.loads((files("fourfold.planning.calibration") / "published.toml").read_text(encoding="utf-8"))
