"""Inject a fault into the program: replace a piece of source in the functions of a module that is loaded already."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any


@contextmanager
def mutated(module_name: str, old: str, new: str) -> Iterator[None]:
    """Run the block with ``old``, which must stand once in the module's functions, replaced by ``new``."""
    module = importlib.import_module(module_name)
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{module_name} has {source.count(old)} times: {old}"
    assert old.count("\n") == new.count("\n"), "line numbers would move, and every function seem changed"
    compiled = dict(_functions_of(compile(source.replace(old, new), inspect.getsourcefile(module), "exec")))
    changed = [
        (function, function.__code__)
        for function in _loaded_functions(module)
        if compiled[function.__qualname__] != function.__code__
    ]
    assert changed, f"no function of {module_name} has: {old}"
    for function, _ in changed:
        function.__code__ = compiled[function.__qualname__]
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _functions_of(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Code by qualified name, of a compiled module or class; functions in functions belong to their outer one."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            name = prefix + constant.co_name
            yield name, constant
            if not constant.co_flags & inspect.CO_NEWLOCALS:  # the body of a class
                yield from _functions_of(constant, name + ".")


def _loaded_functions(module: ModuleType) -> Iterator[FunctionType]:
    """Functions and methods that are written in the module, beneath their decorators."""
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
