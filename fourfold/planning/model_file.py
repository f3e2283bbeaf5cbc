"""A model named by a preset, or by the config.json of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from fourfold.config.model import ModelConfig
from fourfold.config.presets import with_preset
from fourfold.huggingface.architectures.config_json import model_of, read_config


def load_model(name: str) -> tuple[ModelConfig, str]:
    """The sizes of a preset, a config.json, or a folder that has one; and a short name. ``UserError`` otherwise."""
    path = Path(name)
    if not path.is_dir() and path.suffix != ".json":
        return ModelConfig.model_validate(with_preset({"preset": name})), name
    folder = path if path.is_dir() else path.parent
    return model_of(read_config(path), name), folder.resolve().name
