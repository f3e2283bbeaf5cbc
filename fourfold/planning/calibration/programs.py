"""Describe training frameworks by name: which operations a framework fuses, which tensors it stores, and which
communication it hides. Each description names its source."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fourfold.planning.program_flags import OTHER_PROGRAM, OWN_PROGRAM, Program

Overlap = Literal["none", "backward", "pieces"]
ZERO3_HOOKS = 530
"""Host time that DeepSpeed's ZeRO-3 hooks add per block, in units of one kernel launch.

With full recompute, a block of Qwen-1.8B takes 11 ms both with 256 tokens and with 2,048 tokens. So the 11 ms are the
time that the host needs for a block.
"""

ZERO3_MODULES = 6
"""Number of all-gathers per block and pass with DeepSpeed's ZeRO-3. ZeRO-3's hooks gather the weights of each module
separately, and a block has six modules with weights: two norms and four linear layers."""


class Traits(NamedTuple):
    """How a framework runs a step. The columns of a measured run can override these values.

    The defaults describe PyTorch's FSDP without a compiler.
    """

    source: str
    """The framework's code or documentation that the values come from."""
    flags: Program
    """The framework's flags."""
    half_sums: bool = False
    """Whether gradients are summed over ranks in 16 bits, whatever the precision of the run."""
    hides_sums: bool = False
    """Whether the backward pass hides the gradient sum over the data-parallel ranks. Only used if these ranks shard
    optimizer states."""
    tp_overlap: Overlap = "backward"
    """Which computation hides tensor-parallel collectives (see the column ``tp_overlap``)."""
    seq_parallel: bool = False
    """Whether tensor parallelism always includes sequence parallelism."""
    deepspeed: bool = False
    """Whether the framework uses DeepSpeed's optimizer and pipeline."""


def _traits(source: str, flags: dict[str, Any] | None = None, **traits: Any) -> Traits:
    return Traits(source, replace(OTHER_PROGRAM, **{"flash2": True, "regather": True} | (flags or {})), **traits)


_TABLE = tomllib.loads((files("fourfold.planning.calibration") / "programs.toml").read_text(encoding="utf-8"))

PROGRAMS = {name: _traits(**table) for name, table in _TABLE.items()} | {
    "fourfold": Traits("this project: the flags describe its own runs", OWN_PROGRAM)
}
