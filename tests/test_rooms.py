"""Check the rooms of docs/architecture.md: imports follow their order, and no modules import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from source_files import MODULES, REPOSITORY, tree

ROOMS = (
    "errors",
    "parsing",
    "untrusted_files",
    "extras",
    "processes",
    "environment",
    "exit_codes",
    "heartbeat",
    "overlap_order",
    "config",
    "huggingface/architectures",
    "run_file",
    "data",
    "planning/array_fields",
    "planning/machines",
    "planning/program_flags",
    "planning/model_shape",
    "planning/workload",
    "planning/run_workload",
    "planning/cost",
    "planning/search",
    "planning/calibration",
    "planning",
    "torch_internals",
    "models",
    "parallel/grid",
    "parallel/tensor",
    "parallel/state",
    "parallel/memory",
    "parallel/attention",
    "parallel/data",
    "parallel/experts",
    "parallel/pipeline",
    "parallel/overlap",
    "parallel/other_models",
    "parallel",
    "checkpoints",
    "huggingface",
    "launch",
    "matmul_tuning",
    "training",
    "inference",
    "tuning",
    "doctor",
    "memorization",
    "evaluation",
    "verification",
    "reports",
    "train_with_callbacks",
    "jobs",
    "cli",
)
"""The rooms, from bottom to top. If a module's path begins with several of these names, the module belongs to the
longest. A module imports only from its own room and from rooms before it in this list."""

ONE_MAKERS = {"amdsmi", "apex", "cupy", "flash_attn", "nvidia", "pynvml", "rocm", "transformer_engine", "xformers"}
"""Packages that support only the GPUs of one vendor."""

PUBLIC = {
    alias.name: node.module
    for node in ast.walk(tree(MODULES["fourfold"]))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fourfold.")
    for alias in node.names
}
"""The package's public names, and the module that defines each name. The package imports the module at the name's first
use."""


def statements(node: ast.AST, for_types: bool = False) -> Iterator[ast.AST]:
    """Yield every node below this node. Code under TYPE_CHECKING is left out unless ``for_types`` is true."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if isinstance(child, ast.If) and is_for_types and not for_types:
            for otherwise in child.orelse:
                yield otherwise
                yield from statements(otherwise)
        else:
            yield child
            yield from statements(child, for_types)


def module_of(name: str) -> str | None:
    """Return the module that a dotted name refers to. For a function or class, this is the module that defines it."""
    parent, _, attribute = name.rpartition(".")
    if name in MODULES or parent == "fourfold":
        return name if name in MODULES else PUBLIC.get(attribute)
    return parent if parent in MODULES else None


def names_used(file: ast.Module, for_types: bool = False) -> Iterator[str]:
    """Yield every dotted name that a file imports: at its top, inside functions, or by a string."""
    for node in statements(file, for_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fourfold":
            yield f"fourfold.{node.attr}"
        elif isinstance(node, ast.Constant) and re.fullmatch(r"fourfold(\.\w+)+(:\w+)?", str(node.value)):
            yield str(node.value).partition(":")[0]


def modules_used(file: ast.Module, for_types: bool = False) -> frozenset[str]:
    """Return the modules of fourfold that a file imports. With ``for_types``, include imports under TYPE_CHECKING."""
    modules = (module_of(name) for name in names_used(file, for_types))
    return frozenset(module for module in modules if module not in (None, "fourfold"))


@cache
def imports(module: str, for_types: bool = False) -> frozenset[str]:
    """Return the other modules of fourfold that a module imports."""
    return modules_used(tree(MODULES[module]), for_types) - {module}


def room(module: str) -> str:
    """Return the room that a module is in."""
    place = module.removeprefix("fourfold.").replace(".", "/")
    return max((name for name in ROOMS if f"{place}/".startswith(f"{name}/")), key=len, default="")


def circles() -> set[frozenset[str]]:
    """Return import cycles: groups of modules that import each other, directly or through other modules (Tarjan 1972).
    Imports for types count too."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found = set()

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        path.append(module)
        for other in imports(module, for_types=True):
            if other not in order:
                visit(other)
            if other in path:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            start = path.index(module)
            group = frozenset(path[start:])
            del path[start:]
            if len(group) > 1:
                found.add(group)

    for module in MODULES:
        if module not in order:
            visit(module)
    return found


def test_every_module_is_in_a_room() -> None:
    assert {module for module in MODULES if not room(module)} == {"fourfold", "fourfold.__main__"}
    assert {room(module) for module in MODULES} >= set(ROOMS)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from fourfold import train", "fourfold.jobs"),
        ("import fourfold\nfourfold.parallelize(model, grid)", "fourfold.huggingface.parallelize"),
        ("from fourfold import errors", "fourfold.errors"),
        ("def later():\n    from fourfold.cli.app import app", "fourfold.cli.app"),
        ("import importlib\nimportlib.import_module('fourfold.cli.app')", "fourfold.cli.app"),
        ("imported('fourfold.training.trainer:train')", "fourfold.training.trainer"),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import fourfold.jobs", "fourfold.jobs"),
        ("if TYPE_CHECKING:\n    import fourfold.jobs", None),
        ("from fourfold import __version__", None),
    ],
)
def test_every_way_to_import_is_seen(source: str, module: str | None) -> None:
    assert modules_used(ast.parse(source)) == ({module} if module else set())


def test_imports_for_types_are_seen_too() -> None:
    file = ast.parse("if TYPE_CHECKING:\n    import fourfold.jobs")
    assert modules_used(file, for_types=True) == {"fourfold.jobs"}


def test_no_import_points_upwards() -> None:
    upward = {
        (module, other)
        for module in MODULES
        if room(module)
        for other in imports(module, for_types=True)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    }
    assert upward == set()


def test_nothing_imports_what_only_one_maker_of_gpus_has() -> None:
    """With such an import, fourfold would not start on GPUs of another vendor."""
    for path in MODULES.values():
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & ONE_MAKERS, path


def test_no_modules_import_each_other() -> None:
    assert [sorted(group) for group in circles()] == []


def test_architecture_page_has_the_rooms_in_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| room | what is in it |\n")[2].partition("\n\n")[0]
    rooms = re.findall(r"^\| `([\w/]+?)(?:\.py|/)` \|", table, re.MULTILINE)
    assert rooms == list(reversed(ROOMS))
