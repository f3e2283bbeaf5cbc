"""Checks that a run may resume from a checkpoint: same model, same adapters, same order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.checkpoints.saved_state import (
    LAYOUT_FREE_KEYS,
    CheckpointState,
    absolute_name,
    sample_order,
    saved_model,
)
from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.errors import UserError


def check_same_model(path: Path, state: CheckpointState, model: ModelConfig) -> None:
    """Raise ``UserError`` naming the first size in which the checkpoint's model differs from ``model``."""
    # A key that is newer than the checkpoint had its default.
    defaults = {key: field.default for key, field in ModelConfig.model_fields.items() if key not in LAYOUT_FREE_KEYS}
    for key, was, now in _differences(defaults | state.model, saved_model(model)):
        raise UserError(
            f"the checkpoint {path} is of another model: its {key} is {was!r}, and the run file's is {now!r}"
        )


def check_same_adapters(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Raise ``UserError`` unless checkpoint and run train the same adapters of the same model, or neither has any."""
    saved, wanted = state.lora or LoRAConfig(), run.lora
    if (saved.rank, wanted.rank) == (0, 0):
        return
    for key, was, now in _differences(saved.model_dump(), wanted.model_dump()):
        raise UserError(
            f"the checkpoint {path} was trained with lora.{key} = {was!r}, and the run file has {now!r}; set "
            "it back, or set checkpoint.resume = 'never'"
        )
    base, from_hf = (None if name is None else absolute_name(name) for name in (state.base, run.model.from_hf))
    if base != from_hf:
        raise UserError(
            f"the adapters of the checkpoint {path} belong to the model {base}, and model.from_hf is {from_hf}; set it "
            "back, or set checkpoint.resume = 'never'"
        )


def check_same_optimizer(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Raise ``UserError`` where the checkpoint has the states of another optimizer."""
    if state.optimizer != run.optimizer.name:
        raise UserError(
            f"the checkpoint {path} has the states of optimizer.name = '{state.optimizer}', and the run file has "
            f"'{run.optimizer.name}'; set it back, or set checkpoint.resume = 'never'"
        )


def check_has_model(path: Path, state: CheckpointState) -> None:
    """Raise ``UserError`` for a checkpoint of adapters without the model that they belong to."""
    if state.lora is not None:
        command = f"fourfold checkpoint export-hf {path} OUT --merge"
        raise UserError(f"{path} has LoRA adapters only; `{command}` makes a model of it")


def check_same_order(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Raise ``UserError`` when the run's steps read other samples than those before the checkpoint did."""
    for key, was, now in _differences(state.training, sample_order(run)):
        raise UserError(
            f"the checkpoint {path} was trained with training.{key} = {was}, and the run file has {now}, which would "
            "repeat or skip samples; set it back, or set checkpoint.resume = 'never'"
        )


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, saved value and wanted value wherever they differ."""
    return ((key, saved.get(key), value) for key, value in wanted.items() if saved.get(key) != value)
