"""Read the weights of a checkpoint one at a time, in one process and without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from fourfold.checkpoints.saved_state import CheckpointState
from fourfold.checkpoints.verify import parts_of, verify
from fourfold.config.model import ModelConfig
from fourfold.models.dtypes import SAFETENSORS_DTYPES
from fourfold.models.lora import trained_shapes


class SavedWeights:
    """Weights of a checkpoint that any grid has written; with LoRA, its adapters."""

    def __init__(self, path: Path) -> None:
        """Verify and index the files; raises ``DamagedCheckpoint``."""
        self.path = path
        self.state: CheckpointState = verify(path)
        self.model = ModelConfig(**self.state.model)
        self.shapes = trained_shapes(self.model, self.state.lora)
        parts = parts_of(path)
        self._parts = {name: parts[f"model.{name}"] for name in self.shapes}
        self.dtypes = {name: SAFETENSORS_DTYPES[parts[0].dtype] for name, parts in self._parts.items()}

    def read(self, name: str) -> Tensor:
        """Read one whole parameter, in the dtype in which it is stored."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for part in self._parts[name]:
            place = tuple(slice(b, b + n) for b, n in zip(part.begin, part.shape, strict=True))
            with safe_open(part.file, framework="pt") as file:
                whole[place] = file.get_tensor(f"model.{name}")
        return whole
