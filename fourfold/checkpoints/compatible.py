"""Check that a run can resume from a checkpoint: model, adapters, optimizer, and sample order must be the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.checkpoints.saved_state import CheckpointState, absolute_name, sample_order, saved_model
from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.errors import UserError


def changed(path: Path, was: str, now: str) -> UserError:
    """Return the error for a run file that does not fit its checkpoint.

    Args:
        path: The checkpoint's folder.
        was: What the message says about the checkpoint, such as "was trained with lora.rank = 8".
        now: The value in the run file, such as "16".
    """
    return UserError(
        f"the checkpoint {path} {was}, but the run file has {now}; restore the old value, or set checkpoint.resume = "
        "'never'"
    )


def check_same_model(path: Path, state: CheckpointState, model: ModelConfig) -> None:
    """Check that the checkpoint has the model that `model` describes.

    Raises:
        UserError: A key of [model] differs. The message names the first such key.
    """
    # ``ModelConfig`` fills in missing keys. A checkpoint that an older version of fourfold wrote may lack newer keys,
    # and sizes that can be computed from other sizes.
    for key, was, now in _differences(saved_model(ModelConfig(**state.model)), saved_model(model)):
        raise changed(path, f"belongs to another model: its model.{key} is {was!r}", repr(now))


def check_can_resume(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Check that a run can continue from a checkpoint.

    Model, adapters, optimizer, and the order of samples must be the same.

    Raises:
        UserError: A key of the run file differs. The message names the key.
    """
    check_same_model(path, state, run.model)
    _check_same_adapters(path, state, run)
    if state.weights_only:
        return
    if state.optimizer != run.optimizer.name:
        raise changed(path, f"has the states of optimizer.name = '{state.optimizer}'", repr(run.optimizer.name))
    for key, was, now in _differences(state.training, sample_order(run)):
        raise changed(path, f"was trained with training.{key} = {was}", f"{now}, which would repeat or skip samples")


def _check_same_adapters(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Check that the checkpoint and the run have the same LoRA adapters for the same base model, or that both have
    none."""
    saved, wanted = state.lora or LoRAConfig(), run.lora
    if (saved.rank, wanted.rank) == (0, 0):
        return
    for key, was, now in _differences(saved.model_dump(), wanted.model_dump()):
        raise changed(path, f"was trained with lora.{key} = {was!r}", repr(now))
    base, from_hf = (None if name is None else absolute_name(name) for name in (state.base, run.model.from_hf))
    if base != from_hf:
        raise UserError(
            f"the adapters of the checkpoint {path} belong to the model {base}, but model.from_hf is {from_hf}; set it "
            "back, or set checkpoint.resume = 'never'"
        )


def check_has_model(path: Path, state: CheckpointState) -> None:
    """Check that the checkpoint has a full model, not only adapters.

    Raises:
        UserError: The checkpoint holds only adapters.
    """
    if state.lora is not None:
        command = f"fourfold checkpoint export-hf {path} OUT --merge"
        raise UserError(f"{path} has only LoRA adapters; `{command}` merges them into a model")


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with its saved value and the value in the run file."""
    return ((key, saved.get(key), value) for key, value in wanted.items() if saved.get(key) != value)
