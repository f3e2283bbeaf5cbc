"""Format tables and their cells, and put tables into pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(header: tuple[str, ...], rows: Any) -> list[str]:
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(value: Any) -> str:
    return f"{value:.1%}"


def number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def put_between(page: Path, mark: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between the comments ``Begin of MARK`` and ``End of MARK``."""
    begin, end = (f"<!-- {which} of {mark} -->" for which in ("Begin", "End"))
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text("\n".join((before + begin, *lines, end + after)), encoding="utf-8")
