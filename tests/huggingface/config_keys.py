"""Find the keys of config.json that transformers reads for a family, from its source code, and list values to change
them to."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tiny_dense_models import GEMMA_LINEAR, LLAMA3, YARN, F, S

NOT_OF_THE_MODEL = {
    "model_type": "names the family",
    "architectures": "names the class of the family",
    "dtype": "training.precision chooses the type of the computation",
    "torch_dtype": "the same",
    "attribute_map": "of the class, not of a file",
}
"""Keys that the sweep leaves out, and why."""

OF_A_CLASS = (FunctionType, MethodType, classmethod, staticmethod, dict, set, tuple)
"""Types of class attributes that a config.json cannot change."""

READERS = ("getattr", "hasattr", "setattr")
GENERIC = (
    "configuration_utils", "masking_utils", "modeling_layers", "modeling_rope_utils", "modeling_utils",
    "integrations.moe", "integrations.sdpa_attention",
)  # fmt: skip
"""Modules of transformers that every family uses."""


@functools.cache
def keys_of(kind: str) -> tuple[str, ...]:
    """Return the keys that transformers' classes of a family read, in whatever release is installed."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = CONFIG_MAPPING[kind]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    fields = {field.name for field in dataclasses.fields(config_class)}
    keys = fields | set(config_class.attribute_map)
    own = [importlib.import_module(each.__module__) for each in (config_class, model_class)]
    for module in (*own, *(importlib.import_module(f"transformers.{name}") for name in GENERIC)):
        keys |= keys_read_in(module)
    of_class = {key: inspect.getattr_static(config_class, key, None) for key in keys - fields}
    fixed = {key for key, value in of_class.items() if isinstance(value, OF_A_CLASS) or is_read_only(value)}
    return tuple(sorted(keys - fixed - NOT_OF_THE_MODEL.keys()))


def is_read_only(value: Any) -> bool:
    """Return whether an attribute is a property that a file cannot set."""
    return isinstance(value, property) and value.fset is None


@functools.cache
def keys_read_in(module: ModuleType) -> set[str]:
    """Return the keys in ``config.key`` and ``getattr(config, "key")``, and in the module of a configuration also in
    ``self.key`` and kwargs["key"]."""
    is_config = ".configuration_" in module.__name__ or module.__name__.endswith("rope_utils")
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and _is_config(node.value, is_config):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.func, ast.Name):
            if node.func.id in READERS and _is_config(node.args[0], is_config):
                found |= _literal(node.args[1])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop", "setdefault") and _name(node.func.value) == "kwargs" and is_config:
                found |= _literal(node.args[0])
        elif isinstance(node, ast.Subscript) and _name(node.value) == "kwargs" and is_config:
            found |= _literal(node.slice)
    return found


def _is_config(node: ast.expr, in_config: bool) -> bool:
    if isinstance(node, ast.Call):  # such as config.get_text_config()
        return isinstance(node.func, ast.Attribute) and _is_config(node.func.value, in_config)
    name = _name(node)
    return name.endswith("config") or (in_config and name == "self")


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
ROPES: list[Any] = [
    None,
    {},
    LINEAR,
    LLAMA3,
    YARN,
    YARN | {"truncate": False},
    YARN | {"truncate": None},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    YARN | {"attention_factor": 1.3, "beta_fast": 8.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 3.0},
    {F: GEMMA_LINEAR, S: {"rope_type": "default", "rope_theta": 300.0}},
    {F: {"rope_type": "default", "rope_theta": 300.0}, S: GEMMA_LINEAR},
    {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    *({key: v for key, v in table.items() if key != left_out} for table in (LLAMA3, YARN) for left_out in table),
    *(table | {key: 3 * v} for table in (LLAMA3, YARN) for key, v in table.items() if not isinstance(v, str)),
]
ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu"]
SPECIAL: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "layer_types": [[S, S], [F, F], [F, S], [S, F], ["sliding", "full"], ["chunked_attention", F]],
    "mlp_only_layers": [[0], [1], [0, 1]],
    "mlp_layer_types": [["dense", "dense"], ["dense", "sparse"], ["sparse", "dense"], ["sparse", "sparse"], ["sparse"]],
    "layer_rope_theta": [[300.0, 300.0], [0, 300.0], [300.0, 0], [0, 0], [300.0, 1e4], [300.0], [300.0, 300.0, 0]],
    "attention_types": [[[["global"], 2]], [[["local"], 2]], [[["local", "global"], 1]], [[["global"], 1]]],
    "per_layer_config": [{"1": {"rms_norm_eps": 0.5}}, {"0": {"intermediate_size": 40}}],
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "head_dim": [4, 8, 16],
    "original_max_position_embeddings": [8, 30],
    "attn_implementation": ["eager"],
    "rms_norm_eps": [0.5],
    "layer_norm_eps": [0.5],
    "layer_norm_epsilon": [0.5],
    "final_logit_softcapping": [2.0, 6.0, 0.0, None],
}
"""Values for keys that need particular values, because a value of another type or a small change would hardly affect
the logits."""

UNTYPED: list[Any] = [None, True, False, 1, 3, 0.5]
"""Values for a key whose type is unknown, because the family's configurations do not have the key by default."""


def other_values(key: str, value: Any) -> list[Any]:
    """Return values of a key that differ from ``value``. If the type of the key is unknown, return nothing, and use
    ``UNTYPED``."""
    if key in SPECIAL:
        values = SPECIAL[key]
    elif isinstance(value, bool):
        values = [not value]
    elif isinstance(value, int):
        values = [value * 2, value // 2, value + 1, 0, None]
    elif isinstance(value, float):
        values = [value * 2, value / 2, 0.25, 0.0, None]
    else:
        return []
    return [each for each in values if each != value or type(each) is not type(value)]
