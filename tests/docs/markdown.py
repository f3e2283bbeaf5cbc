"""Read the documentation's tables and code blocks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
GENERATED = REPOSITORY / "docs" / "planner_validation.md"
"""A page that git ignores. It exists only if docs/planner_validation.py has run."""
TRACKED = (page for page in sorted((REPOSITORY / "docs").glob("*.md")) if page != GENERATED)
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *TRACKED]


FENCE = re.compile(
    r"^ *(?:<!-- (not run by the tests: [^\n]*) -->\n+ *)?```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)
"""A fenced block, and the HTML comment before it that says why the tests do not run it."""


class Block(NamedTuple):
    """A fenced block of code. A comment in its first line says why the tests do not run it, if they do not."""

    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(language, f"# {why}\n" * bool(why) + textwrap.dedent(text)) for why, language, text in found]


def tables_of(page: Path) -> dict[str, list[list[str]]]:
    """Return the rows of every table by its header row, without the outer bars."""
    tables: dict[str, list[list[str]]] = {}
    for part in re.findall(r"(?:^\|.*\|\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        header, _, *rows = part.splitlines()
        tables[header.strip("| ")] = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return tables


def formula_in(cell: str, **letters: float) -> float:
    """Return the value of the first code expression in a cell."""
    code = re.search(r"`([^`]+)`", cell)
    assert code, cell
    return eval(code[1], {"__builtins__": {}}, letters)
