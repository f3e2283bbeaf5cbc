"""Experts of transformers' models in files: a matrix each, as on the Hub, where the modules stack and join them."""

from __future__ import annotations

import re

from fourfold.huggingface.weight_names import FORMATS

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
