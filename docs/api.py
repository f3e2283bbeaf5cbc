"""Write the reference in docs/api.md from signatures and docstrings: python docs/api.py"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PAGE = Path(__file__).with_name("api.md")
MARKED = re.compile(r"(<!-- reference: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 100
OWN = ("self", "cls")


def rendered(page: str) -> str:
    """Fill the page: write the reference of a function or class after each marker that names it."""
    return MARKED.sub(lambda part: f"{part[1]}\n{reference(part[2])}\n{part[3]}", page)


def reference(path: str) -> str:
    """Return the reference of the function or class at ``package.module.name``. The reference of a class includes its
    public methods and properties."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    parts = [f"```python\n{_signature(name, found)}\n```\n", _prose(found)]
    if inspect.isclass(found):
        parts += [_field_list(found)]
        parts += [f"**`{signature}`** {prose}" for signature, prose in _members(found)]
    return "\n".join(part for part in parts if part.strip())


def fields_of(found: type) -> dict[str, str]:
    """Return the docstring of every public field of a dataclass, or "" for a field without a docstring."""
    if not dataclasses.is_dataclass(found):
        return {}
    fields = {}
    for each in reversed([base for base in found.__mro__ if dataclasses.is_dataclass(base)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, [*definition.body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                value = following.value if isinstance(following, ast.Expr) else None
                fields[statement.target.id] = str(value.value) if isinstance(value, ast.Constant) else ""
    return {name: " ".join(text.split()) for name, text in fields.items() if not name.startswith("_")}


def _field_list(found: type) -> str:
    """Return a Markdown list of a dataclass's fields and their docstrings."""
    lines = [f"- `{name}`: {text.replace('``', '`')}" for name, text in fields_of(found).items() if text]
    return "\n".join([*lines, ""]) if lines else ""


def _members(found: type) -> Iterator[tuple[str, str]]:
    """Yield the signature and the docstring of each public member of a class, in source order, without inherited
    members."""
    for name, member in vars(found).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, _prose(member.fget)
        elif isinstance(member, classmethod | staticmethod):
            yield _signature(name, member.__func__), _prose(member.__func__)
        elif inspect.isfunction(member):
            yield _signature(name, member), _prose(member)


def _signature(name: str, found: Any) -> str:
    """Return the signature with its type annotations. If it does not fit on one line, put each parameter on its own
    line."""
    if isinstance(found, type) and issubclass(found, BaseModel):
        return f"{name}(**values)"
    signature = inspect.signature(found)
    parameters = [_parameter(each) for each in signature.parameters.values() if each.name not in OWN]
    result = signature.return_annotation
    returns = "" if isinstance(found, type) or result is signature.empty else f" -> {result}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    """Return the parameter with its annotation and its default. A default that is a function is shown as "..."."""
    text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    if parameter.annotation is not parameter.empty:
        text += ": " + re.sub("['\"]", "", inspect.formatannotation(parameter.annotation))
    if parameter.default is not parameter.empty:
        text += " = " + ("..." if inspect.isfunction(parameter.default) else repr(parameter.default).replace("'", '"'))
    return text


def _prose(found: Any) -> str:
    """Return the docstring as Markdown, or "" if the class has only the docstring that ``dataclass`` generates."""
    text = inspect.getdoc(found) or ""
    if inspect.isclass(found) and dataclasses.is_dataclass(found) and text.startswith(f"{found.__name__}("):
        return ""
    return re.sub(r"``(.+?)``", r"`\1`", text) + "\n" if text else ""


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
