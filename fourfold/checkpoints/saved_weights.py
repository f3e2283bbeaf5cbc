"""Read the weights of a checkpoint one at a time. One process can do this, without a process group."""

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
    """Reads the weights of a checkpoint. Any grid may have written it. With LoRA, the weights are only the adapters."""

    def __init__(self, path: Path, averaged: bool = False) -> None:
        """Verify the checkpoint, and find out which tensors it has.

        Args:
            path: The checkpoint's folder.
            averaged: Whether to read the moving averages of the weights instead of the weights.

        Raises:
            DamagedCheckpoint: The checkpoint is damaged.
            UserError: The checkpoint has another format, or `averaged` is True and the checkpoint has no averages.
        """
        self.path = path
        self.state, self._layout = verify(path)
        self.model = ModelConfig(**self.state.model)
        self.shapes = saved_shapes(self.model, self.state.lora)
        if averaged and not self.state.has_averages:
            raise UserError(f"{path} has no moving average of its weights; a run with ema.decay above 0 saves one")
        in_layout = self._layout.tensors if averaged else {}
        self._stored = {
            name: f"{AVERAGE}.{name}" if f"{AVERAGE}.{name}" in in_layout else f"model.{name}" for name in self.shapes
        }
        """The name of each parameter's tensor in the checkpoint. With ``averaged``, this is the name of the parameter's
        moving average. The biases of routers have no average, because no gradient trains them."""
        self.dtypes = {name: dtype_of(self._layout, self._stored[name]) for name in self.shapes}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read one parameter, or one expert of it, in its stored dtype.

        Args:
            name: Name of the parameter.
            expert: For a stack of experts, the index of the one expert to read. None reads the full parameter.
        """
        slices = whole_or_part(self.shapes[name], expert)
        whole = torch.empty([s.stop - s.start for s in slices], dtype=self.dtypes[name])
        read_boxes(self.path, self._layout, {self._stored[name]: (whole, slices)})
        return whole if expert is None else whole[0]
