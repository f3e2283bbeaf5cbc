"""The messages that docs/my-run-died.md quotes are messages of the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from markdown import REPOSITORY, blocks_of

PAGE = REPOSITORY / "docs" / "my-run-died.md"
SHELL = REPOSITORY / "fourfold" / "launch" / "job_scripts" / "slurm.sh"
TEXTS = [block.text.strip() for block in blocks_of(PAGE) if block.language == "text"]
MESSAGES = [text for text in TEXTS if not text.endswith("…")]
"""The messages. A text that ends with … is the output of a command, and another test compares it."""
QUOTED = re.compile(r"\bruns/[\w/-]+(?:\.\w+)*|No space left on device")
"""Paths, and messages of the system."""
VALUES = re.compile(
    r"""[\d.,]+|-|node\d|nan|loss|gradient[ ]norm|SIG(?:KILL|SEGV)|MB|GB|steps[ ]are
    |forward[ ]and[ ]backward[ ]of[ ]a[ ]micro-batch""",
    re.VERBOSE,
)
"""Texts that a message of the code fills in: numbers, names, and what a process did."""
SHORTEST = 3


@cache
def pieces() -> list[str]:
    """Return the constant pieces of all f-strings in the code, and all texts of several words. The longest come
    first."""
    found: set[str] = set()
    for path in (REPOSITORY / "fourfold").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        formatted = {id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value} if id(node) in formatted or node.value.count(" ") > 1 else set()
    found = {line for text in found for line in text.split("\n")}
    echoed = re.findall(r'echo "(.*)" >&2', SHELL.read_text(encoding="utf-8"))
    found.update(piece for text in echoed for piece in re.split(r"\$\(\(.*?\)\)|\$\w+", text))
    return sorted((piece for piece in found if len(piece) >= SHORTEST), key=len, reverse=True)


def left_of(message: str) -> str:
    """Return what is left of a message without the texts of the code and without values."""
    message = QUOTED.sub("\0", message)
    for piece in pieces():
        message = message.replace(piece, "\0")
    return re.sub(r"[\s\0:;(),]+", "", VALUES.sub("\0", message))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    assert left_of(message) == ""


def test_a_changed_message_is_noticed() -> None:
    for message in MESSAGES:
        words = re.findall(r"[a-z]{5,}", QUOTED.sub("", message))
        assert left_of(message.replace(words[len(words) // 2], "elsewhere")) != "", message
