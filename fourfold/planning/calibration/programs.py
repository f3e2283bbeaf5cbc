"""Describe training programs by name: which operations a program fuses, which tensors it keeps, and which communication
it hides. Each description names its source."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fourfold.planning.program_flags import OTHER_PROGRAM, OWN_PROGRAM, Program

Overlap = Literal["none", "backward", "pieces"]
ZERO3_HOOKS = 530
"""Host time of DeepSpeed's ZeRO-3 hooks around the modules of a block, as a number of kernel launches. The evidence:
with full recompute, a block of Qwen-1.8B takes 11 ms, both with 256 and with 2,048 tokens."""


class Traits(NamedTuple):
    """How a program runs a step, unless a row overrides it.

    The defaults describe PyTorch's FSDP without a compiler.
    """

    source: str
    """The program's code or documentation that confirms these values."""
    flags: Program
    """The program's flags, unless a row overrides them."""
    half_sums: bool = False
    """Whether gradients are summed over ranks in 16 bits in every precision."""
    hides_sums: bool = False
    """Whether the gradient sum over sharded data-parallel ranks is hidden behind the backward pass."""
    tp_overlap: Overlap = "backward"
    """Which computation hides the tensor-parallel collectives."""
    seq_parallel: bool = False
    """Whether tensor parallelism always includes sequence parallelism."""
    deepspeed: bool = False
    """Whether the program uses DeepSpeed's optimizer and pipeline."""


def _traits(source: str, flags: dict[str, Any] | None = None, **traits: Any) -> Traits:
    return Traits(source, replace(OTHER_PROGRAM, **{"flash2": True, "regather": True} | (flags or {})), **traits)


_TABLE = tomllib.loads((files("fourfold.planning.calibration") / "programs.toml").read_text(encoding="utf-8"))

PROGRAMS = {name: _traits(**table) for name, table in _TABLE.items()} | {
    "fourfold": Traits("this project: the flags are those of its own runs", OWN_PROGRAM)
}
