"""Read the weights of a checkpoint one at a time, in one process and without a process group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from fourfold.checkpoints.saved_state import CheckpointState, read_state
from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.models.dtypes import SAFETENSORS_DTYPES
from fourfold.models.lora import trained_shapes
from fourfold.models.tensor_files import opened_tensors

_SHARDING = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint's key for the place of each part in its whole tensor


class _Part(NamedTuple):
    file: Path
    begin: tuple[int, ...]
    shape: tuple[int, ...]


class SavedWeights:
    """Weights of a checkpoint that any grid has written; with LoRA, its adapters."""

    def __init__(self, path: Path) -> None:
        """Index the files; raises ``UserError`` when the checkpoint is damaged."""
        self.path = path
        self.state: CheckpointState = read_state(path)
        self.model = ModelConfig(**self.state.model)
        self.shapes = trained_shapes(self.model, self.state.lora)
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[_Part]] = {name: [] for name in self.shapes}
        for file in sorted(self.state.files):
            self._note_parts(path / file)
        for name, shape in self.shapes.items():
            held = sum(torch.Size(part.shape).numel() for part in self._parts[name])
            if held < torch.Size(shape).numel():
                raise UserError(f"the checkpoint {path} is damaged: parts of {name} are missing from its files")

    def read(self, name: str) -> Tensor:
        """Read one whole parameter, in the dtype in which it is stored."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for part in self._parts[name]:
            place = tuple(slice(b, b + n) for b, n in zip(part.begin, part.shape, strict=True))
            with safe_open(part.file, framework="pt") as file:
                whole[place] = file.get_tensor(f"model.{name}")
        return whole

    def _note_parts(self, file: Path) -> None:
        with opened_tensors(file) as opened:
            sharding = json.loads((opened.metadata() or {}).get(_SHARDING, "{}"))
            for key in opened.keys():  # noqa: SIM118 (no dictionary)
                name = key.removeprefix("model.")
                if name == key or name not in self._parts:
                    continue
                view = opened.get_slice(key)
                shape = tuple(view.get_shape())
                begin = tuple(sharding.get(key, {}).get("saved_offsets", [0] * len(shape)))
                self._parts[name].append(_Part(file, begin, shape))
                self.dtypes[name] = SAFETENSORS_DTYPES[view.get_dtype()]
