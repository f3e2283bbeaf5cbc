"""The interface of data parallelism to the step; ``replicated`` and ``fully_sharded`` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fourfold.config.run import TrainingConfig
from fourfold.models.dtypes import DTYPES
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid import Grid
from fourfold.parallel.sharding import Tile, tie_again, tied_names, tile_table
from fourfold.parallel.state import LocalShard


@dataclass(frozen=True)
class StepTypes:
    """stored: in which the optimizer steps the weights; working: in which the step computes with them; reduced: in
    which gradients are summed over ranks."""

    stored: torch.dtype
    working: torch.dtype
    reduced: torch.dtype

    @classmethod
    def of(cls, training: TrainingConfig) -> StepTypes:
        return cls(DTYPES[training.master_weights], DTYPES[training.precision], DTYPES[training.reduce_dtype])


@dataclass(frozen=True)
class Units:
    """Modules whose weights are gathered, and whose gradients are summed, together, in the order of the forward.

    last: what follows the blocks, one unit; whatever is named nowhere goes with the whole model.
    """

    embeddings: list[nn.Module]
    blocks: list[nn.Module]
    last: list[nn.Module]


def units_of(model: Transformer) -> Units:
    """Embeddings, each block, and norm and head, as far as a stage has them."""
    embeddings: list[nn.Module] = [
        module for module in (model.embed_tokens, model.embed_positions) if module is not None
    ]
    last: list[nn.Module] = [module for module in (model.norm, model.lm_head) if module is not None]
    return Units(embeddings, list(model.blocks), last)


class DataParallel(ABC):
    """A model as the ranks that split the tokens hold it: what each stores, gathers for use, and sums of gradients."""

    def __init__(self, model: nn.Module, units: Units, grid: Grid, types: StepTypes) -> None:
        """Wrap a model on the meta device whose weights have the type in which they are stored."""
        self.model, self.units, self.grid, self.types = model, units, grid, types

    def materialize(self, device: torch.device) -> None:
        """Give the model uninitialized memory."""
        tied = tied_names(self.model)
        self.model.to_empty(device=device)
        tie_again(self.model, tied)  # materializing visits every module and separates them

    def shards(self) -> list[LocalShard]:
        """Every parameter as this process stores it, in the model's order; a tied one once."""
        tiles = tile_table(self.model)
        return [self.shard(name, parameter, tiles[name]) for name, parameter in self.model.named_parameters()]

    @abstractmethod
    def shard(self, name: str, parameter: nn.Parameter, tile: Tile) -> LocalShard:
        """This process's part of a parameter of the model."""

    @abstractmethod
    def begin_backward(self, last: bool) -> None:
        """Before the backward of a micro-batch: whether it is the last of the step, which completes the gradients."""

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A gradient of a micro-batch that was computed apart from its backward."""
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @abstractmethod
    def finish_gradients(self) -> None:
        """After the last backward of a step: the shards have the sums over all micro-batches and token ranks."""

    @abstractmethod
    def publish(self) -> None:
        """After the stored weights have changed: the next forward computes with them."""

    @abstractmethod
    def free_gathered(self) -> None:
        """After forwards without a backward: drop the weights that were kept for it."""

    @abstractmethod
    def gathered(self) -> list[Tensor]:
        """The weights in memory of their own, besides what is stored, as they are now."""

    @abstractmethod
    def partial_gradients(self) -> list[Tensor]:
        """Gradients that are not yet those of the shards, as they are now."""
