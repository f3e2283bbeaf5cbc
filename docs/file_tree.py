"""Write the file tree in docs/architecture.md from the modules' docstrings: python docs/file_tree.py"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MARKED = re.compile(r"(<!-- tree -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 40
"""Width of the column with the file names, in characters."""

LONGEST = 120
"""Maximum length of a line, in characters. A longer line is cut at its first colon or semicolon."""


def rendered(page: str) -> str:
    """Replace the file tree in the page, which is between two markers."""
    lines = "\n".join(tree(ROOT / "fourfold"))
    return MARKED.sub(lambda part: f"{part[1]}```text\n{lines}\n```\n{part[2]}", page)


def tree(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield the lines for a package: a line for the package itself, a line for each of its modules, and the lines of
    its subpackages."""
    yield _line(f"{folder.name}/", folder / "__init__.py", depth)
    modules = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    for path in sorted(modules):
        yield _line(path.name, path, depth + 1)
    for path in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from tree(path, depth + 1)


def _line(name: str, path: Path, depth: int) -> str:
    """Return a line with the module's name and the first sentence of its docstring, without citations."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    paragraph = re.sub(r" \([^()]*\barXiv [^()]*\)", "", paragraph)
    sentence = re.split(r"(?<=[\w)`\]])\.(?: |$)", paragraph)[0].replace("``", "").rstrip(".")
    line = f"{'  ' * depth + name:<{WIDTH}}{sentence}".rstrip()
    return line if len(line) <= LONGEST else re.split(r"[:;] ", line)[0]


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
