"""A checkpoint is whole: every file what was written, and every tensor covered exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from fourfold.checkpoints.integrity import TENSORS, DamagedCheckpoint, check_contents, check_files, check_together
from fourfold.checkpoints.saved_state import CheckpointState, read_state
from fourfold.config.model import ModelConfig
from fourfold.models.lora import trained_shapes
from fourfold.parsing import parse_json

MOMENTS = ("exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A part of a tensor in a file: its first element in the whole, and its shape."""

    file: Path
    begin: Shape
    shape: Shape
    dtype: str
    """The name of the type in safetensors."""


def verify(path: Path) -> CheckpointState:
    """Check all of a checkpoint in one process. Raises ``DamagedCheckpoint``."""
    _check_structure(path)
    check_contents(path)
    return read_state(path)


def verify_together(path: Path) -> None:
    """Check a checkpoint, of which every process reads a share.

    Raises the same ``DamagedCheckpoint`` on all processes.
    """
    check_together(path, _check_structure)


def _check_structure(path: Path) -> None:
    """Check all but the contents of tensor files."""
    state = read_state(path)
    check_files(path)
    shapes = trained_shapes(ModelConfig(**state.model), state.lora)
    expected = {f"model.{name}": shape for name, shape in shapes.items()}
    if not state.weights_only:
        expected |= {f"optimizer.{moment}.{name}": shape for name, shape in shapes.items() for moment in MOMENTS}
    parts = parts_of(path)
    for name, shape in expected.items():
        _check_covered(path, name, shape, parts[name])


def parts_of(path: Path) -> dict[str, list[Part]]:
    """The parts of every tensor. Raises ``DamagedCheckpoint``."""
    found: dict[str, list[Part]] = defaultdict(list)
    for file in sorted(path.glob(f"*{TENSORS}")):
        try:
            with safe_open(file, framework="pt") as opened:
                sharding = parse_json((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in opened.keys():  # noqa: SIM118 (no dictionary)
                    view = opened.get_slice(name)
                    shape = tuple(view.get_shape())
                    begin = tuple(int(place) for place in sharding.get(name, {}).get("saved_offsets", [0] * len(shape)))
                    found[name].append(Part(file, begin, shape, view.get_dtype()))
        except (SafetensorError, ValueError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{file} is damaged: {error}; resume from another checkpoint") from None
    return found


def _check_covered(path: Path, name: str, shape: Shape, parts: list[Part]) -> None:
    """Check that the parts are inside the tensor, begin at different places, and have as many elements as it."""
    inside = all(
        len(part.begin) == len(shape)
        and all(b >= 0 and b + n <= s for b, n, s in zip(part.begin, part.shape, shape, strict=True))
        for part in parts
    )
    filled = [part for part in parts if math.prod(part.shape)]
    distinct = len({part.begin for part in filled}) == len(filled)
    if not inside or not distinct or sum(math.prod(part.shape) for part in filled) != math.prod(shape):
        raise DamagedCheckpoint(
            f"{path} is damaged: its files do not hold {name} exactly once; resume from another checkpoint"
        )
