"""The rules of docs/architecture.md: rooms in order, no circles, one name for one thing, nothing too long."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (REPOSITORY / "fourfold").rglob("*.py")
}
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))

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
    "planning/workload",
    "planning/run_workload",
    "planning/cost",
    "planning/search",
    "planning/calibration",
    "planning",
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
    "train_with_callbacks",
    "jobs",
    "reports",
    "cli",
)
"""From bottom to top. A module belongs to the longest name that its path begins with, and imports only from its own
room and the rooms before it."""

KNOWN_UPWARD: set[tuple[str, str]] = set()
"""Imports (module, imported module) that still point upwards."""

LONG_FUNCTIONS = {
    "fourfold.cli.audit.audit": "its options, one a line",
    "fourfold.cli.generate.generate": "its options, one a line",
    "fourfold.cli.prepare.prepare": "its options, one a line",
    "fourfold.cli.tune.tune": "its options, one a line",
    "fourfold.config.model._fill_and_check": "every default that depends on an earlier one, in order",
    "fourfold.inference.loki.triton_kernels.decode": "the launches of a step, with one argument a line",
    "fourfold.parallel.data.fully_sharded.__init__": "FSDP2 takes units in one order only",
    "fourfold.planning.calibration.fit._levels": "one regression, whose matrices stay local",
    "fourfold.planning.run_workload.workload_of": "one field a line",
    "fourfold.planning.search.explain.neighbors": "one change a line",
}
"""Functions of more than 50 lines, each with the reason why it stays in one piece."""

PUBLIC_DESPITE_UNDERSCORE = {
    "_asdict": "NamedTuple's",
    "_exit": "os's",
    "_current_graph_task_id": "torch's",
    "_overloadpacket": "torch's",
    "_attn_implementation": "transformers'",
    "_tp_plan": "transformers'",
    "_loglikelihood_tokens": "lm-eval's TemplateLM, which calls it",
}
INSIDE_TORCH = {"fake_cuda.py", "simulated_gpu.py"}
"""Test files that replace a GPU below torch. No name there is public."""

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "perf_counter_ns", "monotonic_ns"}
WITH_A_CLOCK = {
    "patience.py": "gives up a wait",
    "pool.py": "gives up a wait, and orders the failures of ranks",
    "sampling.py": "starts no test after the time that an option names",
    "test_kill_sweep.py": "kills at a random moment of the start",
    "test_pool.py": "a rank hangs, which the pool must notice",
    "test_stream.py": "a source is dead, which the reader must notice",
    "test_tracking.py": "a tracker hangs, which the end must notice",
    "test_trial_processes.py": "a trial hangs, which the search must notice",
    "test_timeline.py": "the time of recorded steps is inside of the time that their process takes",
}
"""Test files that have a clock or a short time limit, each with the reason. All other tests move a clock of their own,
because machines differ in speed."""
SHORTEST_TIMEOUT = 300
LONGEST_FILE, LONGEST_FUNCTION = 350, 50
ONE_MAKERS = {"amdsmi", "apex", "cupy", "flash_attn", "nvidia", "pynvml", "rocm", "transformer_engine", "xformers"}
"""Packages that exist only for the GPUs of one maker."""


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


PUBLIC = {
    alias.name: node.module
    for node in ast.walk(tree(MODULES["fourfold"]))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fourfold.")
    for alias in node.names
}
"""The package's public names, which it imports at their first use, and the module of each."""


def statements(node: ast.AST, for_types: bool = False) -> Iterator[ast.AST]:
    """Yield every node below this one; what only type checkers read is left out unless ``for_types``."""
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
    """Return the module that a dotted name is or is in. A public name of the package is in the module that defines
    it."""
    parent, _, attribute = name.rpartition(".")
    if name in MODULES or parent == "fourfold":
        return name if name in MODULES else PUBLIC.get(attribute)
    return parent if parent in MODULES else None


def names_used(file: ast.Module, for_types: bool = False) -> Iterator[str]:
    """Yield dotted names that a file imports at its top or inside its functions, or has in a string to import by."""
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
    """Return the modules of fourfold that a file imports, and with ``for_types`` also those under TYPE_CHECKING."""
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
    """Return groups of modules that import each other, also through other modules or for types (Tarjan 1972)."""
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


def functions() -> Iterator[tuple[str, int]]:
    """Yield every function as module.name, with its number of lines, not counting its docstring."""
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                documented = ast.get_docstring(node) is not None
                docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
                yield f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1 - docstring


def private_names(path: Path) -> set[str]:
    """Return the private names that a file uses of modules, or of objects other than ``self``."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fourfold", "benchmarks")):
            found.update(alias.name for alias in node.names)
            found.update((node.module or "").split("."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "torch"):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "delattr")):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            found.update(part for text in texts if isinstance(text, str) for part in text.split("."))
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_definitions(path: Path) -> set[str]:
    """Return the private functions and methods, and the private attributes of ``self``, that a file defines."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


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
        for other in imports(module)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    }
    assert upward == KNOWN_UPWARD


def test_nothing_imports_what_only_one_maker_of_gpus_has() -> None:
    """With such an import, the program would not start on GPUs of another maker."""
    for path in MODULES.values():
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & ONE_MAKERS, path


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def tricks(file: ast.Module) -> set[str]:
    """Return assignments to ``__class__``, and calls of a parent's ``__init__`` other than by ``super()``."""
    found = set()
    for node in ast.walk(file):
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".__init__"):
            found |= {ast.unparse(node.func)} - {"super().__init__"}
    return found


def test_no_object_changes_its_class_and_no_class_skips_its_parents_init() -> None:
    assert tricks(ast.parse("block.__class__ = A")) and tricks(ast.parse("nn.Module.__init__(self)"))
    assert {module: found for module, path in MODULES.items() if (found := tricks(tree(path)))} == {}


def test_no_modules_import_each_other() -> None:
    assert [sorted(group) for group in circles()] == []


def test_architecture_page_has_the_rooms_in_order() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| room | what is in it |\n")[2].partition("\n\n")[0]
    rooms = re.findall(r"^\| `([\w/]+?)(?:\.py|/)` \|", table, re.MULTILINE)
    assert rooms == list(reversed(ROOMS))


def test_no_module_uses_private_names_of_another() -> None:
    definitions = {path: private_definitions(path) for path in MODULES.values()}
    defined = set().union(*definitions.values()) - {"_replace", "_timeout"}  # named tuples and torch have these too
    used = {str(path): (private_names(path) & defined) - definitions[path] for path in MODULES.values()}
    assert {path: names for path, names in used.items() if names} == {}


PRIVATE_TORCH = {
    "huggingface/parallelize.py": {"_buffers", "_non_persistent_buffers_set"},
    "huggingface/parallelized.py": {"torch.utils._pytree"},
    "inference/loki/traffic.py": {"torch.utils._pytree"},
    "models/lora.py": {"_modules"},
    "parallel/data/fully_sharded.py": {
        "torch.distributed.fsdp._fully_shard._fsdp_common", "_comm_ctx", "_fsdp_param_group", "_fsdp_param_groups",
        "_get_fsdp_state", "_init_sharded_post_forward_param_metadata", "_orig_dtype", "_orig_size",
        "_partial_reduce_output", "_root_post_backward_final_callback", "_unsharded_param",
    },
    "parallel/grid/checksums.py": {"torch.utils._python_dispatch", "_overloadpacket"},
    "parallel/grid/process_group.py": {"_get_backend", "_set_default_timeout"},
    "parallel/other_models/tensor_plan.py": {"_DropoutNd"},
    "parallel/overlap/batch_parts.py": {
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    },
    "parallel/pipeline/schedule.py": {"torch.distributed.pipelining._schedule_visualizer"},
    "training/optimizer.py": {"_cdata"},
    "verification/recorder.py": {"torch.utils._python_dispatch", "torch.utils._pytree", "_cdata", "_overloadpacket"},
    "verification/trace.py": {"torch._subclasses.fake_tensor", "torch.testing._internal.distributed.fake_pg"},
}  # fmt: skip
"""Private names of torch by file, apart from its operators. A new version of torch may change them: whoever adds one
looks for a public name first. FSDP2's are all in one file, the adapter."""


def private_torch(path: Path) -> set[str]:
    """Return the private modules of torch that a file imports, and the private attributes that it uses of objects that
    are not its own."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\b.*\._", node.module or ""):
            found.add(node.module or "")
        elif isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "os", "ATEN") and not node.attr.startswith("_foreach"):
                found.add(node.attr)
    return found - {
        "_replace",
        "_asdict",
        "_fields",
        "_attn_implementation",
    }  # named tuples and transformers have these


def test_private_names_of_torch_are_listed() -> None:
    own = set().union(*(private_definitions(path) for path in MODULES.values()))
    used = {str(path.relative_to(REPOSITORY / "fourfold")): private_torch(path) - own for path in MODULES.values()}
    assert {file: names for file, names in used.items() if names} == PRIVATE_TORCH


def test_base_names_are_unique() -> None:
    names = defaultdict(list)
    for module, path in MODULES.items():
        if path.name != "__init__.py" and room(module) != "cli":
            names[path.stem].append(module)
    assert [modules for modules in names.values() if len(modules) > 1] == []


def test_no_file_is_too_long() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module for module, lines in lengths.items() if lines > LONGEST_FILE} == set()


def test_long_functions_are_listed_with_a_reason() -> None:
    found = {name for name, lines in functions() if lines > LONGEST_FUNCTION}
    assert found == LONG_FUNCTIONS.keys()


@pytest.mark.parametrize("path", [path for path in TESTS if path.name not in INSIDE_TORCH], ids=lambda path: path.stem)
def test_tests_use_public_names_only(path: Path) -> None:
    assert private_names(path) - PUBLIC_DESPITE_UNDERSCORE.keys() == set()


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in TESTS if path.name != "conftest.py")
    assert [name for name, times in names.items() if times > 1] == []


def clocks_read(path: Path) -> set[str]:
    """Return the calls of a clock in a test file, and the limits of time that a busy machine may exceed."""
    found = set()
    for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
        if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            found.add(node.func.attr)
        limits = [each.value for each in node.keywords if each.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("communicate", "wait", "join"):
            limits += node.args
        found.update(
            f"timeout={each.value}"
            for each in limits
            if isinstance(each, ast.Constant) and isinstance(each.value, int | float) and each.value < SHORTEST_TIMEOUT
        )
    return found


@pytest.mark.parametrize(
    "source", ["a = time.perf_counter()", "process.communicate(timeout=30)", "run(a, timeout=1.5)", "event.wait(10)"]
)
def test_every_kind_of_time_limit_is_seen(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert clocks_read(tmp_path / "a.py")


def test_tests_do_not_depend_on_the_speed_of_the_machine() -> None:
    found = {path.name: clocks for path in TESTS if (clocks := clocks_read(path))}
    assert found.keys() == WITH_A_CLOCK.keys(), found
