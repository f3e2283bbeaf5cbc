"""Read the weights of a checkpoint one at a time, in one process and without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fourfold.checkpoints.global_tensors import AVERAGE
from fourfold.checkpoints.rank_files import dtype_of, read_boxes
from fourfold.checkpoints.verify import saved_shapes, verify
from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.models.tensor_files import whole_or_part


class SavedWeights:
    """Weights of a checkpoint that any grid has written; with LoRA, its adapters."""

    def __init__(self, path: Path, averaged: bool = False) -> None:
        """Verify and index the files; raises ``DamagedCheckpoint``.

        averaged: read the moving averages in place of the weights; ``UserError`` where there are none.
        """
        self.path = path
        self.state, self._layout = verify(path)
        self.model = ModelConfig(**self.state.model)
        self.shapes = saved_shapes(self.model, self.state.lora)
        if averaged and not self.state.has_averages:
            raise UserError(f"{path} has no average of its weights; train with ema.decay to have one")
        in_layout = self._layout.tensors if averaged else {}
        self._stored = {
            name: f"{AVERAGE}.{name}" if f"{AVERAGE}.{name}" in in_layout else f"model.{name}" for name in self.shapes
        }
        """Names in the checkpoint: the biases of routers, which no gradient moves, have no average."""
        self.dtypes = {name: dtype_of(self._layout, self._stored[name]) for name in self.shapes}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read one whole parameter, or one expert of it where it stacks them, in the dtype in which it is stored."""
        slices = whole_or_part(self.shapes[name], expert)
        whole = torch.empty([s.stop - s.start for s in slices], dtype=self.dtypes[name])
        read_boxes(self.path, self._layout, {self._stored[name]: (whole, slices)})
        return whole if expert is None else whole[0]

    def fill(self, weights: dict[str, Tensor]) -> None:
        """Fill whole parameters, by name. Raises ``UserError`` for one that is not there in this shape."""
        for name, whole in weights.items():
            if tuple(whole.shape) != self.shapes.get(name):
                raise UserError(f"{self.path} has no {name} of the shape {list(whole.shape)}")
        boxes = {
            self._stored[name]: (whole, tuple(slice(0, n) for n in whole.shape)) for name, whole in weights.items()
        }
        read_boxes(self.path, self._layout, boxes)
