"""The list of files in docs/architecture.md follows the package."""

from __future__ import annotations

import sys

from markdown import REPOSITORY

sys.path.append(str(REPOSITORY / "docs"))

import file_tree

PAGE = REPOSITORY / "docs" / "architecture.md"


def test_the_page_lists_every_file_with_the_first_sentence_of_its_docstring() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert file_tree.rendered(page) == page
    for path in (REPOSITORY / "fourfold").rglob("*.py"):
        assert path.name in ("__init__.py", "__main__.py") or f" {path.name} " in page, path
