"""Predict the size of checkpoints, and check that the disk has space for them."""

import math
import shutil
from pathlib import Path

from fourfold.config.optimizer_rules import STATES, rule_of
from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import WriteFailed
from fourfold.models.dtypes import DTYPES
from fourfold.models.lora import trained_shapes

HEADER_BYTES = 512
"""Upper limit, in bytes, of one tensor's entry in a file's header."""


def checkpoint_bytes(run: RunConfig) -> int:
    """Estimate the size of one checkpoint in bytes: weights, optimizer states, averages, and headers."""
    shapes = trained_shapes(run.model, run.lora)
    weight = DTYPES[run.training.master_weights].itemsize
    moment = 4 if run.optimizer.stochastic_rounding else weight
    average = 4 if run.ema.decay else 0
    states = {name: len(STATES[rule_of(name, len(shape), run.optimizer.name)]) for name, shape in shapes.items()}
    headers = sum(1 + number + bool(average) for number in states.values()) * HEADER_BYTES * run.parallel.world_size
    sizes = ((math.prod(shape), states[name]) for name, shape in shapes.items())
    return sum(size * (weight + number * moment + average) for size, number in sizes) + headers


def free_bytes(folder: Path) -> int:
    """Return how many bytes are free on the disk of a folder. The folder need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def check_room(folder: Path, run: RunConfig) -> None:
    """Check that one more checkpoint fits on the disk, next to all existing ones.

    Old checkpoints are removed only after the new one is complete, so their space cannot be counted as free.

    Raises:
        WriteFailed: The checkpoint does not fit.
    """
    needed, free = checkpoint_bytes(run), free_bytes(folder)
    if free < needed:
        raise WriteFailed(
            f"a checkpoint needs {_size(needed)}, but {folder} has space for {_size(free)}; free some space, or change "
            "output_dir"
        )


def check_room_at_start(folder: Path, run: RunConfig) -> None:
    """Check before a run that one checkpoint fits on the disk.

    Do nothing if the section [checkpoint] asks for no checkpoint.

    Raises:
        WriteFailed: The checkpoint does not fit.
    """
    if run.checkpoint.save_last or 0 < run.checkpoint.interval <= run.training.train_steps:
        check_room(folder, run)


def _size(count: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB")) if count >= u), (1e6, "MB"))
    return f"{count / unit:,.3g} {name}"
