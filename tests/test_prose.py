"""Check that the prose in code, pages, and messages follows the rules in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
GROUPS = {
    "code": sorted((REPOSITORY / "fourfold").rglob("*.py")),
    "pages": [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"],
    "tests": [
        path for name in ("tests", "examples", "benchmarks") for path in sorted((REPOSITORY / name).rglob("*.py"))
    ],
}
CONSTRUCTIONS = {
    'use "if" or "when"; "where" is for places and equations': (r"(?<![\w`])where (?!(?:is|are|to|do|does)\b)", 1.5),
    'repeat the noun instead of "that of" or "those which"': (
        r"\b(?:that|those) (?:of|that|which|in|on|from|with)\b",
        0.4,
    ),
    'start a new sentence instead of "in which"': (
        r"\b(?:in|of|on|with|by|from|for|to|over|at|behind|through) (?:which|whose|whom)\b",
        0.8,
    ),
    'say "and", "next to", or "except" instead of "beside"': (r"\bbesides?\b", 0.1),
    'name what "others" and "the rest" are': (r"\b(?:others|the rest|the other|another's)\b", 0.6),
    "split the sentence at the semicolon": (r";", 4.0),
}
"""Patterns, and how often each pattern may occur per 1,000 words in a group of files. Other well-written projects stay
below these limits."""

AWKWARD = """
passages stand
hardly repeats
it is them
that starts others
that others wrote
costs no bit
nobody is left behind
goes on on
what cannot save
but products become
those of several
beside each other
divide over no
divides over no
has no size of one
few rows an expert
so many of the fastest
do so in any number
layers' worth of work
without a product between
what to make of
told of every
causal mask is that
take that of
or beside it
each as its
what stands in
answered as
none is kept
in these three
have other bits
is of a mixture
there are hardly any
of which more takes
went on where it was
"""
"""Phrases that once made readers stop. None of them may come back."""


def words_of_page(text: str) -> str:
    """Return a Markdown page's sentences, without code, tables, and addresses."""
    for pattern in (r"```.*?```", r"^\s*\|.*$", r"^ {4,}.*$"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE if pattern.startswith("```") else re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"<[^>]+>", "", re.sub(r"`[^`]*`", "X", text)))


def words_of_code(text: str) -> str:
    """Return the docstrings and comments of a Python file."""
    found = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return re.sub(r"`+[^`]*`+", "X", "\n".join(found))


def messages_of_code(text: str) -> Iterator[str]:
    """Yield the texts of errors, options, and keys of the run file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError":
            parts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield " ".join(part for part in parts if isinstance(part, str))
        elif (
            isinstance(node, ast.keyword)
            and node.arg in ("description", "help")
            and isinstance(node.value, ast.Constant)
        ):
            yield str(node.value.value)


@cache
def prose(path: Path) -> str:
    """Return the prose of a file."""
    text = path.read_text(encoding="utf-8")
    return words_of_page(text) if path.suffix == ".md" else words_of_code(text)


def per_thousand_words(pattern: str, texts: Iterable[str]) -> float:
    """Return how often a pattern occurs per 1,000 words, in any case."""
    text = "\n".join(texts)
    return 1000 * len(re.findall(pattern, text, re.IGNORECASE)) / max(len(re.findall(r"[A-Za-z']+", text)), 1)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rule", CONSTRUCTIONS)
def test_sentences_are_plain(rule: str, group: str) -> None:
    pattern, limit = CONSTRUCTIONS[rule]
    assert per_thousand_words(pattern, map(prose, GROUPS[group])) <= limit, most_often(pattern, GROUPS[group])


@pytest.mark.parametrize("rule", [rule for rule, (pattern, _) in CONSTRUCTIONS.items() if pattern != ";"])
def test_messages_are_plain(rule: str) -> None:
    """Semicolons are allowed, because messages have one between what is wrong and what works."""
    pattern, limit = CONSTRUCTIONS[rule]
    messages = [text for path in GROUPS["code"] for text in messages_of_code(path.read_text(encoding="utf-8"))]
    assert per_thousand_words(pattern, messages) <= limit, [text for text in messages if re.search(pattern, text)]


@pytest.mark.parametrize("phrase", AWKWARD.split("\n")[1:-1])
def test_awkward_phrases_stay_away(phrase: str) -> None:
    pattern = rf"\b{re.escape(phrase)}\b"
    paths = [path for group in GROUPS.values() for path in group]
    assert [path.name for path in paths if re.search(pattern, " ".join(prose(path).lower().split()))] == []


def test_a_counter_sees_docstrings_comments_and_sentences() -> None:
    assert words_of_code('"""One."""\na = "no"  # Two; `b;`') == "One.\nTwo; X"
    assert words_of_page("One [two](x;y).\n\n| a; |\n\n```\nb;\n```\n    c;\n").split() == ["One", "[two]."]
    assert list(messages_of_code('raise UserError(f"a {b}; c")')) == ["a  ; c"]
    assert per_thousand_words(";", ["one two; three", "four"]) == 250


def most_often(pattern: str, paths: Iterable[Path]) -> list[str]:
    """Return the files with the most matches. A failed test shows them."""
    counts = {path: len(re.findall(pattern, prose(path), re.IGNORECASE)) for path in paths}
    worst = sorted(counts, key=lambda path: -counts[path])[:8]
    return [f"{path.relative_to(REPOSITORY)}: {counts[path]}" for path in worst if counts[path]]
