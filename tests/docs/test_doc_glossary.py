"""The code uses the words of docs/glossary.md, and the glossary names only modules that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from markdown import REPOSITORY

ELSEWHERE = {
    "vpp": "a column of measured rows",
    "tuned_products": "a key of the run file",
    "batch_repeat_interleave": "a method of transformers' caches",
    "products_KDD": "outer products of keys",
    "product": "a product of keys of the run file",
    "failing_together": "all processes fail",
    "raise_together": "all processes fail",
}
"""Names that may contain a refused word, and what they mean."""


def refused() -> dict[str, str]:
    """Return the words that names must not contain, each with the word to use instead."""
    section = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Words in the code")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section, re.MULTILINE)
    return {word: use for use, words in rows for word in re.findall(r"`(\w+)`", words)}


def public_names() -> Iterator[tuple[str, str]]:
    """Yield every module and each name in it: modules, classes, functions, and annotated fields."""
    for path in sorted((REPOSITORY / "fourfold").rglob("*.py")):
        module = path.relative_to(REPOSITORY).as_posix()
        yield from ((module, part) for part in path.relative_to(REPOSITORY).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield module, node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield module, node.target.id


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def test_public_names_use_the_words_of_the_glossary() -> None:
    instead, used = refused(), set()
    assert {"gemm", "vpp", "turns"} <= instead.keys()
    wrong = []
    for module, name in public_names():
        if found := [word for word in words_of(name) if word in instead and not name.startswith("_")]:
            used.add(name)
            wrong += [f"{module}: {name} says {word}; use {instead[word]}" for word in found if name not in ELSEWHERE]
    assert not wrong, "\n".join(sorted(set(wrong)))
    assert ELSEWHERE.keys() <= used, "names that are gone, or use the words of the glossary now"


def test_a_word_is_found_in_every_style_of_name() -> None:
    assert words_of("ProductTable") == ["product", "table"]
    assert words_of("last_product") == ["last", "product"]
