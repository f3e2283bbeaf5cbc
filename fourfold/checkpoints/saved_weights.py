"""Read the weights of a checkpoint one at a time, in one process and without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fourfold.checkpoints.rank_files import dtype_of, read_boxes
from fourfold.checkpoints.verify import saved_shapes, verify
from fourfold.config.model import ModelConfig
from fourfold.errors import UserError


class SavedWeights:
    """Weights of a checkpoint that any grid has written; with LoRA, its adapters."""

    def __init__(self, path: Path) -> None:
        """Verify and index the files; raises ``DamagedCheckpoint``."""
        self.path = path
        self.state, self._layout = verify(path)
        self.model = ModelConfig(**self.state.model)
        self.shapes = saved_shapes(self.model, self.state.lora)
        self.dtypes = {name: dtype_of(self._layout, f"model.{name}") for name in self.shapes}

    def read(self, name: str) -> Tensor:
        """Read one whole parameter, in the dtype in which it is stored."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.fill({name: whole})
        return whole

    def fill(self, weights: dict[str, Tensor]) -> None:
        """Fill whole parameters, by name. Raises ``UserError`` for one that is not there in this shape."""
        for name, whole in weights.items():
            if tuple(whole.shape) != self.shapes.get(name):
                raise UserError(f"{self.path} has no {name} of the shape {list(whole.shape)}")
        boxes = {f"model.{name}": (whole, tuple(slice(0, n) for n in whole.shape)) for name, whole in weights.items()}
        read_boxes(self.path, self._layout, boxes)
