"""Predict the size of checkpoints, and check that the disk has space for them."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from fourfold.config.optimizer_rules import STATES, rule_of
from fourfold.config.run import CheckpointConfig, RunConfig
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

    Also warn if the disk is too small for all checkpoints that the run will keep. Do nothing if the run never saves.

    Raises:
        WriteFailed: Not even one checkpoint fits.
    """
    saves = run.training.train_steps // run.checkpoint.interval if run.checkpoint.interval else 0
    if not saves and not run.checkpoint.save_last:
        return
    check_room(folder, run)
    at_once = _kept_at_once(run.checkpoint, saves) + run.validation.keep_best
    saved = len(list(folder.glob("step_*")))
    more, free = max(1, at_once - saved) * checkpoint_bytes(run), free_bytes(folder)
    if free < more:
        print(
            f"warning: the run's checkpoints will need {_size(more)} more, but {folder} has space for {_size(free)}; "
            "keep fewer (checkpoint.keep_latest_k, checkpoint.keep_every), or free some space",
            file=sys.stderr,
        )


def _kept_at_once(config: CheckpointConfig, saves: int) -> int:
    """Return how many checkpoints exist right after the run's last save.

    Args:
        saves: Number of saves before the last one.
    """
    older = saves - config.keep_latest_k
    if not config.keep_latest_k or older <= 0:
        return saves + 1
    forever = older * config.interval // math.lcm(config.interval, config.keep_every) if config.keep_every else 0
    return config.keep_latest_k + 1 + forever


def _size(count: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB")) if count >= u), (1e6, "MB"))
    return f"{count / unit:,.3g} {name}"
