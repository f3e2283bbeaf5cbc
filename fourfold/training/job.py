"""One training job as one process holds it: model, optimizer and grid, and the step that they take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.communicate import all_reduce
from fourfold.parallel.data_parallel import DTYPES, fsdp_modules, set_last_micro_batch
from fourfold.parallel.grid import Grid
from fourfold.parallel.parallelize import parallelize
from fourfold.parallel.state import (
    LocalShard,
    clip_gradients,
    initialize_shards,
    local_shards,
    materialize,
    sum_partial_gradients,
)
from fourfold.training.optimizer import ShardedAdamW, learning_rate


@dataclass(frozen=True)
class MicroBatch:
    """What one forward reads: token and label ids [B, S]; positions and documents [B, S] where they matter."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None


@dataclass(frozen=True)
class StepResult:
    """Of one step, over all ranks: mean loss of the kept tokens, gradient norm before clipping, kept tokens."""

    loss: Tensor
    grad_norm: Tensor
    kept_tokens: Tensor


class Job:
    """A model on the grid with its optimizer."""

    def __init__(self, run: RunConfig, grid: Grid, device: torch.device, model: Transformer | None = None) -> None:
        """Give memory to ``model`` (default: a new ``meta_model``); ``initialize`` it then, or load a checkpoint."""
        self.run, self.grid, self.device = run, grid, device
        self.model = meta_model(run, grid) if model is None else model
        materialize(self.model, device, run.model.tie_word_embeddings)
        self.shards: list[LocalShard] = local_shards(self.model, grid)
        self.optimizer = ShardedAdamW(self.shards, run.optimizer)

    def initialize(self, seed: int) -> None:
        """Fill the weights; the same seed gives the same weights on every grid."""
        initialize_shards(self.shards, self.run.model, seed)

    def train_step(self, micro_batches: Sequence[MicroBatch], step: int) -> StepResult:
        """Forward and backward of every micro-batch, one clipped optimizer step; ``step`` counts from 0."""
        kept = self.count_kept(micro_batches)
        loss = self.backward(micro_batches, kept)
        norm = self.clip()
        self.optimizer.step(self.learning_rate(step))
        return StepResult(self.sum_over_batch(loss, "loss") / kept, norm, kept)

    def backward(self, micro_batches: Sequence[MicroBatch], kept: Tensor) -> Tensor:
        """Gradients of the mean loss of the step's ``kept`` tokens; returns this rank's sum of losses."""
        total = torch.zeros((), device=self.device)
        for i, micro_batch in enumerate(micro_batches):
            set_last_micro_batch(self.model, i == len(micro_batches) - 1, self.run.parallel.zero)
            loss = self.loss(micro_batch)
            (loss / kept.clamp(min=1)).backward()
            total += loss.detach()
        sum_partial_gradients(self.shards, self.grid)
        return total

    def clip(self) -> Tensor:
        """Clip the gradients to ``optimizer.max_grad_norm``; the norm before."""
        return clip_gradients(self.shards, self.run.optimizer.max_grad_norm)

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """Sum of the losses of the kept tokens of this rank's micro-batch."""
        return self.model(micro_batch.tokens, micro_batch.labels, micro_batch.positions, micro_batch.documents)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Mean loss of the kept tokens over all ranks, without gradients."""
        kept = self.count_kept(micro_batches)
        loss = sum(self.loss(micro_batch) for micro_batch in micro_batches)
        self.free_gathered_weights()
        return self.sum_over_batch(loss, "loss") / kept

    def free_gathered_weights(self) -> None:
        """After forwards with no backward: drop the weights that FSDP2 keeps for it."""
        for module in fsdp_modules(self.model):
            module.reshard()

    def learning_rate(self, step: int) -> float:
        run = self.run
        return learning_rate(step, run.training.train_steps, run.optimizer.lr, run.lr_scheduler)

    def count_kept(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Tokens of a step, over all ranks, that the loss counts."""
        return self.sum_over_batch(sum((mb.labels != IGNORE_INDEX).sum() for mb in micro_batches), "kept tokens")

    def sum_over_batch(self, value: Tensor, why: str) -> Tensor:
        """Sum a scalar over the ranks that split the batch."""
        return all_reduce(value.clone(), self.grid.batch, why)


def meta_model(run: RunConfig, grid: Grid) -> Transformer:
    """This process's part of the model, without memory; the whole never exists."""
    with torch.device("meta"):
        model = Transformer(run.model).to(DTYPES[run.training.master_weights])
    return parallelize(model, grid, run)
