"""One training job as one process holds it: model, optimizer and grid, and the step that they take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.communicate import all_reduce
from fourfold.parallel.context import take_chunks
from fourfold.parallel.data_parallel import DTYPES, DataParallel
from fourfold.parallel.grid import Grid
from fourfold.parallel.parallelize import parallelize
from fourfold.parallel.state import (
    LocalShard,
    clip_gradients,
    initialize_shards,
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

    def __init__(self, run: RunConfig, grid: Grid, device: torch.device, model: DataParallel | None = None) -> None:
        """Give memory to ``model`` (default: a new ``meta_model``); ``initialize`` it then, or load a checkpoint."""
        self.run, self.grid, self.device = run, grid, device
        self.data_parallel = meta_model(run, grid) if model is None else model
        self.model = self.data_parallel.model
        self.data_parallel.materialize(device)
        self.shards: list[LocalShard] = self.data_parallel.shards()
        self.optimizer = ShardedAdamW(self.shards, run.optimizer)

    def initialize(self, seed: int) -> None:
        """Fill the weights; the same seed gives the same weights on every grid."""
        initialize_shards(self.shards, self.run.model, seed)
        self.data_parallel.publish()

    def train_step(self, micro_batches: Sequence[MicroBatch], step: int) -> StepResult:
        """Forward and backward of every micro-batch, one clipped optimizer step; ``step`` counts from 0."""
        kept = self.count_kept(micro_batches)
        loss = self.backward(micro_batches, kept)
        norm = self.clip()
        self.update(step)
        return StepResult(self.sum_over_tokens(loss, "loss") / kept, norm, kept)

    def backward(self, micro_batches: Sequence[MicroBatch], kept: Tensor) -> Tensor:
        """Gradients of the mean loss of the step's ``kept`` tokens; returns this rank's sum of losses."""
        total = torch.zeros((), device=self.device)
        for i, micro_batch in enumerate(micro_batches):
            self.data_parallel.begin_backward(last=i == len(micro_batches) - 1)
            loss = self.loss(micro_batch)
            (loss / kept.clamp(min=1)).backward()
            total += loss.detach()
        self.data_parallel.finish_gradients()
        sum_partial_gradients(self.shards, self.grid)
        return total

    def clip(self) -> Tensor:
        """Clip the gradients to ``optimizer.max_grad_norm``; the norm before."""
        return clip_gradients(self.shards, self.run.optimizer.max_grad_norm)

    def update(self, step: int) -> None:
        """Step the optimizer with the clipped gradients."""
        self.optimizer.step(self.learning_rate(step))
        self.data_parallel.publish()

    def loss(self, micro_batch: MicroBatch) -> Tensor:
        """Sum of the losses of the kept tokens of this rank's micro-batch."""
        mine = self.my_tokens(micro_batch)
        return self.model(mine.tokens, mine.labels, mine.positions, mine.documents)

    def my_tokens(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's share of the sequences, where cp splits them. Documents stay whole: attention compares them."""
        cp = self.grid.cp
        if cp.size == 1:
            return micro_batch
        tokens, labels, positions = micro_batch.tokens, micro_batch.labels, micro_batch.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mine = (take_chunks(t, cp.rank, cp.size) for t in (tokens, labels, positions))
        return MicroBatch(*mine, micro_batch.documents)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Mean loss of the kept tokens over all ranks, without gradients."""
        kept = self.count_kept(micro_batches)
        loss = sum(self.loss(micro_batch) for micro_batch in micro_batches)
        self.data_parallel.free_gathered()
        return self.sum_over_tokens(loss, "loss") / kept

    def learning_rate(self, step: int) -> float:
        run = self.run
        return learning_rate(step, run.training.train_steps, run.optimizer.lr, run.lr_scheduler)

    def count_kept(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Tokens of a step, over all ranks, that the loss counts."""
        mine = sum((self.my_tokens(micro_batch).labels != IGNORE_INDEX).sum() for micro_batch in micro_batches)
        return self.sum_over_tokens(mine, "kept tokens")

    def sum_over_tokens(self, value: Tensor, why: str) -> Tensor:
        """Sum a scalar over the ranks that split the tokens."""
        return all_reduce(value.clone(), self.grid.tokens, why)


def meta_model(run: RunConfig, grid: Grid) -> DataParallel:
    """This process's part of the model, without memory; the whole never exists."""
    with torch.device("meta"):
        model = Transformer(run.model).to(DTYPES[run.training.master_weights])
    return parallelize(model, grid, run)
