"""Plant a fault in the program: replace a piece of code in a function of a loaded module. The piece is found by its
syntax tree, so comments, formatting, and line numbers do not matter.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

Body = list[ast.stmt]


@contextmanager
def mutated(place: str, old: str, new: str) -> Iterator[list[str]]:
    """Run the block with ``old`` replaced by ``new``, and yield the functions that change.

    Args:
        place: ``module:function``, or ``module:Class.method``, or only the module.
        old: An expression or statements that occur there exactly once.
        new: The replacement. It is an expression if ``old`` is one, and statements if ``old`` is statements. If an
            expression is a statement by itself, statements can replace it.
    """
    module_name, _, function_name = place.partition(":")
    module = importlib.import_module(module_name)
    tree = mutated_tree(inspect.getsource(module), function_name, old, new)
    file = inspect.getsourcefile(module)
    assert file is not None
    compiled = dict(_functions_of(compile(tree, file, "exec", dont_inherit=True)))
    changed = [
        (function, function.__code__)
        for function in _loaded_functions(module)
        if compiled[function.__qualname__] != function.__code__
    ]
    assert changed, f"{place} is no loaded function, or the fault changes nothing: {old}"
    for function, _ in changed:
        function.__code__ = compiled[function.__qualname__]
    try:
        yield [function.__qualname__ for function, _ in changed]
    finally:
        for function, code in changed:
            function.__code__ = code


def mutated_tree(source: str, function_name: str, old: str, new: str) -> ast.Module:
    """Parse a module, and replace the one place in a function that equals ``old``. Without a function name, search the
    whole module.

    Raises ``AssertionError`` if there is no such function, or not exactly one such place.
    """
    tree = ast.parse(source)
    scopes = dict(definitions(tree))
    assert not function_name or function_name in scopes, f"there is no {function_name}; there are {', '.join(scopes)}"
    scope = scopes[function_name] if function_name else tree
    pattern, replacement = _expression(old), _expression(new)
    found: list[Any]
    if pattern is not None and replacement is not None:
        found = [
            (parent, field, place)
            for parent, field, place, node in _children(scope)
            if isinstance(node, ast.expr) and _same(node, pattern)
        ]
        assert len(found) == 1, f"{function_name or 'the module'} has {len(found)} times: {old}"
        parent, field, place = found[0]
        before = getattr(parent, field) if place is None else getattr(parent, field)[place]
        _locate([replacement], before)
        if hasattr(before, "ctx"):
            replacement.ctx = before.ctx  # type: ignore[attr-defined]
        if place is None:
            setattr(parent, field, replacement)
        else:
            getattr(parent, field)[place] = replacement
    else:
        statements, others = _statements(old), _statements(new) or [ast.Pass()]
        count = len(statements)
        found = [
            (body, first)
            for body in _bodies(scope)
            for first in range(len(body) - count + 1)
            if all(_same(*pair) for pair in zip(body[first : first + count], statements, strict=True))
        ]
        assert len(found) == 1, f"{function_name or 'the module'} has {len(found)} times: {old}"
        body, first = found[0]
        _locate(others, body[first])
        body[first : first + count] = others
    return ast.fix_missing_locations(tree)


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and method of a tree with its qualified name. A property's getter comes before its
    setter."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{prefix}{child.name}.")


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(f"(\n{textwrap.dedent(text)}\n)", mode="eval").body if text.strip() else None
    except SyntaxError:
        return None


def _statements(text: str) -> Body:
    """Parse statements. ``return`` and ``yield`` may be outside a function."""
    return ast.parse(textwrap.dedent(text)).body


def _same(one: ast.AST, other: ast.AST) -> bool:
    """Return whether two trees are equal. Reading a name and assigning to it count as equal."""
    return _dump(one) == _dump(other)


def _dump(node: ast.AST) -> str:
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()")


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """For every node below this node, yield its parent, the parent's field, and the index in that field if the field is
    a list."""
    for parent in ast.walk(node):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.AST):
                yield parent, field, None, value
            elif isinstance(value, list):
                yield from ((parent, field, i, each) for i, each in enumerate(value) if isinstance(each, ast.AST))


def _bodies(node: ast.AST) -> Iterator[Body]:
    for parent in ast.walk(node):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(parent, field, None)
            if isinstance(body, list):
                yield body


def _locate(new: list[Any], old: ast.AST) -> None:
    """Give the new nodes the line numbers of the old node. Otherwise, all later functions would seem to have
    changed."""
    for root in new:
        for node in ast.walk(root):
            ast.copy_location(node, old)


def _functions_of(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Return the code of every function in a compiled module or class, by qualified name. Inner functions belong to
    their outer function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = prefix + constant.co_name
            yield name, constant
            if not constant.co_flags & inspect.CO_NEWLOCALS:  # this is a class body
                yield from _functions_of(constant, name + ".")


def _loaded_functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield functions and methods that the module defines, without their decorators."""
    file = inspect.getsourcefile(module)
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for function in filter(None, map(_function_in, members)):
            if function.__module__ == module.__name__ and function.__code__.co_filename == file:
                yield function


def _function_in(value: Any) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None
