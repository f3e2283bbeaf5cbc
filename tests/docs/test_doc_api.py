"""The API page's examples run in order, its reference matches the code, and every public name is documented."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown import REPOSITORY, blocks_of
from patience import PATIENCE

PAGE = REPOSITORY / "docs" / "api.md"
NAMES = re.findall(r"<!-- reference: ([\w.]+) -->", PAGE.read_text(encoding="utf-8"))
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\n((?: {4}.*(?:\n|$)|\n)+)", re.MULTILINE)


@pytest.mark.slow
def test_the_examples_run(workplace: Path) -> None:
    pytest.importorskip("transformers")
    (toml,) = (block for block in blocks_of(PAGE) if block.language == "toml")
    (workplace / "notes.toml").write_text(toml.text, encoding="utf-8")
    examples = [block.text for block in blocks_of(PAGE) if block.language == "python" and "import" in block.text]
    (workplace / "program.py").write_text("\n".join(examples), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=workplace, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_matches_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PAGE.parent)
    from api import rendered

    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run python docs/api.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_result_and_error_is_documented(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PAGE.parent)
    module, _, short = name.rpartition(".")
    assert list(missing_in(getattr(importlib.import_module(module), short))) == []


def missing_in(found: Any) -> Iterator[str]:
    """Yield what is missing in the docstrings of a function, or of a class on the page."""
    from api import fields_of

    if not inspect.isclass(found):
        yield from missing_in_call(found.__name__, found, inspect.getdoc(found))
        return
    yield from (f"{name}: no docstring" for name, text in fields_of(found).items() if not text)
    constructor = vars(found).get("__init__")
    if constructor is not None and not fields_of(found):
        doc = f"{inspect.getdoc(found)}\n\n{inspect.getdoc(constructor)}"
        yield from missing_in_call(found.__name__, constructor, doc)
    for name, member in vars(found).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield from missing_in_call(f"{found.__name__}.{name}", function, inspect.getdoc(function))


def missing_in_call(name: str, function: Callable[..., Any], doc: str | None) -> Iterator[str]:
    """Yield parameters that Args lacks. Also yield Returns or Raises if the docstring needs the section but lacks it.

    A summary that begins with "Return" needs no Returns section. Raises is needed if the function itself raises an
    error.
    """
    if not doc:
        yield f"{name}: no docstring"
        return
    sections = dict(SECTION.findall(doc))
    signature = inspect.signature(function)
    documented = re.findall(r"^ {4}(\w+): \S", sections.get("Args", ""), re.MULTILINE)
    yield from (
        f"{name}: Args lacks {each}" for each in signature.parameters if each not in (*documented, "self", "cls")
    )
    returns = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    if returns and not doc.startswith(("Return ", "Yield ")) and not sections.keys() & {"Returns", "Yields"}:
        yield f"{name}: no Returns"
    if "raise UserError(" in inspect.getsource(inspect.unwrap(function)) and "UserError" not in sections.get(
        "Raises", ""
    ):
        yield f"{name}: no Raises"


def test_a_docstring_that_lacks_something_is_found() -> None:
    def half(first: int, second: int) -> int:
        """Add.

        Args:
            first: A number.
        """
        return first + second

    assert list(missing_in_call("half", half, inspect.getdoc(half))) == ["half: Args lacks second", "half: no Returns"]
