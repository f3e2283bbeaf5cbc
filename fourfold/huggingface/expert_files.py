"""Experts of transformers' models in files: a matrix each, as on the Hub, where the modules stack and join them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fourfold.huggingface.weight_names import FORMATS, HEAD, head_of

_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_JOINS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameters of a module of experts → our names of the matrices that they join, one below the other."""


def matrices_of(kind: str, name: str) -> list[str]:
    """The names in files of the matrices that a stack joins for each expert ``{e}``, one below the other.

    Empty for a parameter that is no stack, and a model_type ``kind`` that has no mixture of experts here.
    """
    found = _STACK.fullmatch(name)
    rows = FORMATS[kind].table.items() if kind in FORMATS else ()
    theirs = {ours[0].rpartition(".")[2]: their for their, ours in rows if "{e}" in their}
    if found is None or not theirs:
        return []
    return [theirs[each].replace("{i}", found[1]) for each in _JOINS[found[2]]]


def name_in_files(kind: str, name: str) -> str:
    """The name in files of a parameter that is no stack."""
    return name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name


Rows = dict[str, range]
"""Tensors of files → the rows of a parameter that each holds, counted through all the experts that it stacks."""


def rows_in_files(model: Any) -> dict[str, Rows]:
    """Find the tensors of files that every parameter of a model becomes, by all its names.

    The table of transformers says so, for its models: stacks of experts become a matrix for each expert, and some
    parameters have another name. A parameter that files hold in another order keeps its own name.
    """
    found: dict[str, Rows] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        counts = tuple(parameter.shape[: 2 if parameter.ndim == 3 else 1])
        rows = range(math.prod(counts))
        found[name] = {name: rows}
        if not hasattr(model, "base_model_prefix") or not counts or not rows:
            continue
        from transformers.core_model_loading import revert_weight_conversion

        inner = parameter.shape[len(counts) :]
        numbers = torch.arange(len(rows)).view(*counts, *(1 for _ in inner))
        # Two columns show the order of the rows. The converters copy what they get.
        parts = revert_weight_conversion(model, {name: numbers.expand(*counts, *(min(size, 2) for size in inner))})
        firsts = {theirs: part.reshape(len(part), -1)[:, 0].tolist() for theirs, part in parts.items() if part.numel()}
        runs = {theirs: range(rows_of[0], rows_of[-1] + 1) for theirs, rows_of in firsts.items()}
        if runs and all([*runs[theirs]] == rows_of for theirs, rows_of in firsts.items()):
            found[name] = runs
    return found


def in_modules(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model of transformers by the names of its modules, from all that its files have; differentiable."""
    kind: str = model.config.model_type
    found = {}
    stored = (name for name in dict(model.named_buffers()) if name_in_files(kind, name) in tensors)
    for name in (*dict(model.named_parameters()), *stored):
        matrices = matrices_of(kind, name)
        if matrices:
            experts = range(len(model.get_parameter(name)))
            found[name] = torch.stack([torch.cat([tensors[m.format(e=e)] for m in matrices]) for e in experts])
        else:  # files of some families call the head by another name than the module has
            found[name] = tensors[head_of(kind) if name == HEAD else name_in_files(kind, name)]
    return found
