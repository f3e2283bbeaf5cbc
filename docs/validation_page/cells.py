"""Format tables and their cells for the page."""

from __future__ import annotations

from typing import Any


def table(header: tuple[str, ...], rows: Any) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(value: Any) -> str:
    return f"{value:.1%}"


def number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
