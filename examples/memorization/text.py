"""Write English text that every machine has: the docstrings of Python's standard library, one document each."""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from fourfold.data.sources import PYTHON_STDLIB, list_inputs, read_documents

SHORTEST = 200  # Characters. Shorter docstrings are left out.


def docstrings() -> Iterator[str]:
    """Yield the docstrings of modules, classes, and functions, file by file. Leave out docstrings with fewer than 200
    characters, and repeated docstrings."""
    seen: set[str] = set()
    for source in (text for file in list_inputs([PYTHON_STDLIB]) for text in read_documents(file.path)):
        try:
            # Invalid escape sequences in old source code cause warnings.
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source)
        except SyntaxError:
            # The standard library's tests contain files with deliberate syntax errors.
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield text


def write_text(path: Path, characters: int) -> None:
    """Write docstrings to a file, one JSON object per line, until they have about this many characters together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for text in docstrings():
            if written >= characters:
                break
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), int(sys.argv[2]))
