"""No file uses the private names of another file. A list has every private name of torch that the package uses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source_files import MODULES, REPOSITORY, TESTS, tree

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
"""Test files that simulate a GPU inside torch, where all names are private."""


def private_names(path: Path) -> set[str]:
    """Return the private names of modules, and of objects other than ``self``, that a file uses."""
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


def test_no_module_uses_private_names_of_another() -> None:
    definitions = {path: private_definitions(path) for path in MODULES.values()}
    # Named tuples have ``_replace``, and torch has ``_timeout``.
    defined = set().union(*definitions.values()) - {"_replace", "_timeout"}
    used = {str(path): (private_names(path) & defined) - definitions[path] for path in MODULES.values()}
    assert {path: names for path, names in used.items() if names} == {}


PRIVATE_TORCH = {
    "parallel/data/fully_sharded.py": {
        "torch.distributed.fsdp._fully_shard._fsdp_common.HSDPMeshInfo", "_comm_ctx", "_fsdp_param_group",
        "_fsdp_param_groups", "_get_fsdp_state", "_init_sharded_post_forward_param_metadata", "_orig_dtype",
        "_orig_size", "_partial_reduce_output", "_root_post_backward_final_callback", "_unsharded_param",
    },
    "torch_internals.py": {
        "torch._subclasses.fake_tensor.FakeTensorMode", "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops", "torch.utils._pytree.tree_iter",
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
        "_get_backend", "_init_backend", "_non_persistent_buffers_set", "_timeout",
    },
}  # fmt: skip
"""Private names of torch that each file uses, except operators. A new version of torch may change them. So before you
add a name here, look for a public name. Only two files may use private names: the adapter for FSDP2, and the adapter
for everything else, whose functions ``test_torch_internals`` tests one by one."""

NOT_TORCH = {"_replace", "_asdict", "_fields", "_attn_implementation", "_tp_plan", "_init_weights", "_click"}
"""Private names of named tuples, of transformers, and of typer."""


def private_torch(path: Path) -> set[str]:
    """Return the private names of torch that a file imports, and the private attributes of other objects that it uses,
    also by a string or as the name of an argument."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {f"{parent}{alias.name}" for alias in node.names if re.match(r"torch\b.*\._", parent + alias.name)}
        elif isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "os", "ATEN") and not node.attr.startswith("_foreach"):
                found.add(node.attr)
        elif isinstance(node, ast.keyword) and re.match(r"_[a-zA-Z]", node.arg or ""):
            found.add(str(node.arg))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr", "hasattr")):
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            found |= {text for text in texts if re.match(r"_[a-zA-Z]", text)}
    return found - NOT_TORCH


def test_private_names_of_torch_are_listed() -> None:
    own = set().union(*(private_definitions(path) for path in MODULES.values()))
    used = {str(path.relative_to(REPOSITORY / "fourfold")): private_torch(path) - own for path in MODULES.values()}
    assert {file: names for file, names in used.items() if names} == PRIVATE_TORCH


@pytest.mark.parametrize("path", [path for path in TESTS if path.name not in INSIDE_TORCH], ids=lambda path: path.stem)
def test_tests_use_public_names_only(path: Path) -> None:
    assert private_names(path) - PUBLIC_DESPITE_UNDERSCORE.keys() == set()
