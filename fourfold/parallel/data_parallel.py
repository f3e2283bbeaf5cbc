"""What the two ways of data parallelism, ``replicated`` and ``fully_sharded``, offer the step alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn

from fourfold.config.run import RunConfig
from fourfold.models.transformer import Transformer
from fourfold.parallel.grid import Grid
from fourfold.parallel.sharding import Tile, tile_table
from fourfold.parallel.stage import Stage
from fourfold.parallel.state import LocalShard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallel(ABC):
    """A model as the ranks that split the tokens hold it: what each stores, gathers for use, and sums of gradients."""

    def __init__(self, model: Transformer, grid: Grid, run: RunConfig) -> None:
        """Wrap a model on the meta device whose weights have the type in which they are stored."""
        self.model, self.grid, self.run = model, grid, run

    def materialize(self, device: torch.device) -> None:
        """Give the model uninitialised memory."""
        self.model.to_empty(device=device)
        if self.run.model.tie_word_embeddings and not isinstance(self.model, Stage):
            # Materialising visits both modules and parts them.
            self.model.lm_head.weight = self.model.embed_tokens.weight

    def shards(self) -> list[LocalShard]:
        """Every parameter as this process stores it, in the model's order; a tied one once.

        Of a pipeline's tied embedding the first stage and the last have a copy each, by one name.
        """
        tiles = tile_table(self.model)
        shards = [self.shard(name, parameter, tiles[name]) for name, parameter in self.model.named_parameters()]
        if self.run.model.tie_word_embeddings and isinstance(self.model, Stage):
            ends = {"embed_tokens.weight", "lm_head.weight"}
            return [
                replace(shard, name="embed_tokens.weight", replicas=2 * shard.replicas) if shard.name in ends else shard
                for shard in shards
            ]
        return shards

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
