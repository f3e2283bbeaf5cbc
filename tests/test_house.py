"""Check the house rules: one name for one thing, no tricks with classes, and no overlong files or functions."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from source_files import MODULES, REPOSITORY, TESTS, tree

LONG_FUNCTIONS = {
    "fourfold.cli.audit.documents": "its options, one a line",
    "fourfold.cli.generate.generate": "its options, one a line",
    "fourfold.cli.prepare.prepare": "its options, one a line",
    "fourfold.cli.tune.tune": "its options, one a line",
    "fourfold.parallel.data.fully_sharded.__init__": "FSDP2 takes units in one order only",
    "fourfold.planning.calibration.fit._levels": "one regression, whose matrices stay local",
    "fourfold.planning.search.explain.neighbors": "one change a line",
}
"""Functions of more than 50 lines, each with the reason why it stays in one piece."""

LONGEST_FILE, LONGEST_FUNCTION = 350, 50
WITHOUT_INIT = {"ABC", "Generic", "Protocol"}
"""Classes of the standard library without an ``__init__`` that must run."""


def functions() -> Iterator[tuple[str, int]]:
    """Yield the name of every function (module.name) and its number of lines without the docstring."""
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                documented = ast.get_docstring(node) is not None
                docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
                yield f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1 - docstring


def classes(files: Iterable[ast.Module]) -> Iterator[ast.ClassDef]:
    for file in files:
        yield from (node for node in ast.walk(file) if isinstance(node, ast.ClassDef))


def aliases(file: ast.Module) -> set[str]:
    """Return the names of types that a file defines without a class, such as ``Rules = dict[str, Rule]``."""
    values = {
        target.id: node.value
        for node in file.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", target.id)
    }
    return {name for name, value in values.items() if isinstance(value, ast.Subscript | ast.BinOp)}


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in classes([tree(path)]):
            places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_other_type_has_the_name_of_a_class() -> None:
    assert aliases(ast.parse("Rules = dict[str, int]\nNumber = int | float\nMOST = SIZES[0]")) == {"Rules", "Number"}
    names = {node.name for node in classes(map(tree, MODULES.values()))}
    assert {module: found for module, path in MODULES.items() if (found := aliases(tree(path)) & names)} == {}


def tricks(file: ast.Module) -> set[str]:
    """Return the places where a file assigns to ``__class__``, names it in a string, or calls a parent's ``__init__``
    without ``super()``."""
    found = set()
    for node in ast.walk(file):
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__init__"):
            found |= {ast.unparse(node.func)} - {"super().__init__"}
        elif isinstance(node, ast.Constant) and node.value == "__class__":
            found.add("a string")
    return found


def skipped_inits(files: Iterable[ast.Module]) -> set[str]:
    """Return the classes whose ``__init__`` does not call the ``__init__`` of a parent. A class from another package
    counts as a parent with an ``__init__``."""
    by_name = {node.name: node for node in classes(files)}

    def init_of(node: ast.ClassDef) -> ast.FunctionDef | None:
        return next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)

    def parent_has_init(node: ast.ClassDef) -> bool:
        names = {ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases}
        own = [by_name[name] for name in names & by_name.keys()]
        return bool(names - by_name.keys() - WITHOUT_INIT) or any(init_of(p) or parent_has_init(p) for p in own)

    inits = {name: init for name, node in by_name.items() if (init := init_of(node)) and parent_has_init(node)}
    return {name for name, init in inits.items() if "super().__init__(" not in ast.unparse(init)}


def test_no_object_changes_its_class_and_no_class_skips_its_parents_init() -> None:
    for trick in ("block.__class__ = A", "setattr(block, '__class__', A)", "nn.Module.__init__(self)"):
        assert tricks(ast.parse(trick)), trick
    assert {module: found for module, path in MODULES.items() if (found := tricks(tree(path)))} == {}
    skips = "class A(Generic[T]):\n def __init__(self): ...\nclass B(A): ...\nclass C(B):\n def __init__(self): ..."
    assert skipped_inits([ast.parse(skips)]) == {"C"}
    assert skipped_inits(map(tree, MODULES.values())) == set()


def test_base_names_are_unique() -> None:
    names = defaultdict(list)
    for module, path in MODULES.items():
        if path.name != "__init__.py" and not module.startswith("fourfold.cli."):
            names[path.stem].append(module)
    assert [modules for modules in names.values() if len(modules) > 1] == []


def test_no_file_is_too_long() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module for module, lines in lengths.items() if lines > LONGEST_FILE} == set()


def test_long_functions_are_listed_with_a_reason() -> None:
    found = {name for name, lines in functions() if lines > LONGEST_FUNCTION}
    assert found == LONG_FUNCTIONS.keys()


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in TESTS if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []


def patched_names() -> Iterator[str]:
    """Yield each name of the package that a test or a benchmark replaces, given as text."""
    for path in [*TESTS, *(REPOSITORY / "benchmarks").rglob("*.py")]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("patch", "setattr")) and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and str(name.value).startswith("fourfold."):
                    yield str(name.value)


def test_every_name_that_is_replaced_exists() -> None:
    """mypy does not check names in text. Most benchmarks run only in the slow tests."""
    names = set(patched_names())
    assert len(names) > 10
    for name in names:
        pkgutil.resolve_name(name)
