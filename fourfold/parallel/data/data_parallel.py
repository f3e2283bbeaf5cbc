"""Define the interface of data parallelism. The modules ``replicated`` and ``fully_sharded`` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.config.run import TrainingConfig
from fourfold.models.dtypes import DTYPES
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import LocalShard
from fourfold.parallel.tensor.sharding import Tile, tie_again, tied_names, tile_table


@dataclass(frozen=True)
class StepTypes:
    """The dtypes of the tensors in a step."""

    stored: torch.dtype
    """Dtype of the stored weights, which the optimizer updates."""
    working: torch.dtype
    """Dtype of weights and activations in the forward and the backward pass."""
    reduced: torch.dtype
    """Dtype of gradients while they are summed over a step's micro-batches and over ranks."""

    @property
    def gradient(self) -> torch.dtype:
        """Return the dtype of gradients after all sums. It is at least as precise as ``reduced``, so the summed
        gradients are not rounded before they are clipped."""
        return torch.promote_types(self.stored, self.reduced)

    @classmethod
    def of(cls, training: TrainingConfig) -> StepTypes:
        return cls(DTYPES[training.master_weights], DTYPES[training.precision], DTYPES[training.reduce_dtype])


@dataclass(frozen=True)
class Units:
    """A model's modules in forward order, grouped into units. One all-gather collects all weights of a unit, and one
    collective sums all gradients of a unit over ranks.

    Each block is a unit. The modules in ``last``, which follow the blocks, form one unit together. How embeddings form
    units depends on the subclass of ``DataParallel``. All other modules belong to the root unit.
    """

    embeddings: list[nn.Module]
    blocks: list[nn.Module]
    last: list[nn.Module]


def units_of(model: Transformer) -> Units:
    """Return the units of a decoder or of one of its pipeline stages."""
    embeddings = [module for module in (model.embed_tokens, model.embed_positions) if module is not None]
    last = [module for module in (model.norm, model.lm_head) if module is not None]
    return Units([*embeddings], [*model.blocks], [*last])


class DataParallel(ABC):
    """A model on the ranks of dp·cp·z, which split the tokens of a step.

    Subclasses define what each rank stores, which weights are gathered, and how gradients are summed.
    """

    def __init__(self, model: nn.Module, units: Units, grid: Grid, types: StepTypes) -> None:
        """Wrap a model on the meta device. Its trained weights must have the dtype ``types.stored``."""
        self.model, self.units, self.grid, self.types = model, units, grid, types

    def materialize(self, device: torch.device) -> None:
        """Allocate uninitialized memory for the model."""
        tied = tied_names(self.model)
        self.model.to_empty(device=device)
        # to_empty replaces the parameters of one module at a time, so tied weights are no longer tied.
        tie_again(self.model, tied)

    def shards(self) -> list[LocalShard]:
        """Return what this process stores of each parameter, in the order of the model. A tied parameter appears
        once."""
        tiles = tile_table(self.model)
        return [self.shard(name, parameter, tiles[name]) for name, parameter in self.model.named_parameters()]

    def split_experts(self) -> set[nn.Parameter]:
        """Return the expert weights that the axis ep splits. All ranks of dp·cp·z have the same tile of every other
        parameter (before the tile is sharded)."""
        tiles = tile_table(self.model)
        if self.grid.ep.size == 1:
            return set()
        return {parameter for name, parameter in self.model.named_parameters() if tiles[name].ep is not None}

    @abstractmethod
    def shard(self, name: str, parameter: nn.Parameter, tile: Tile) -> LocalShard:
        """Return the shard of a parameter that this process stores."""

    @abstractmethod
    def begin_backward(self, last: bool) -> None:
        """Prepare for the backward pass of a micro-batch.

        Args:
            last: whether this is the backward pass that completes the gradients of the step. If it is, sums over ranks
                can start during this pass.
        """

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a weight gradient that a pipeline schedule has computed after the backward pass."""
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.grad_dtype)
        else:
            parameter.grad += gradient

    @abstractmethod
    def finish_gradients(self) -> None:
        """Finish the gradients after a step's last backward pass.

        Afterwards, the gradient of each shard is summed over all micro-batches, and over the ranks of dp·cp·z.
        """

    @abstractmethod
    def publish(self) -> None:
        """Make the next forward pass use the stored weights as they are now, for example after an optimizer step."""

    @abstractmethod
    def free_gathered(self) -> None:
        """Free the gathered weights after a forward pass that no backward pass follows. In training, the backward pass
        frees them."""

    @abstractmethod
    def gathered(self) -> list[Tensor]:
        """Return all tensors of weights that are in memory now, except the stored weights."""

    @abstractmethod
    def partial_gradients(self) -> list[Tensor]:
        """Return all tensors of gradients that are in memory now, except the finished gradients of the shards."""
