"""One training job as one process holds it: model, optimizer and grid, and the step that they take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers
from fourfold.models.lora import add_adapters, trained_shapes
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.communicate import all_reduce
from fourfold.parallel.context import take_chunks
from fourfold.parallel.data_parallel import DTYPES, DataParallel
from fourfold.parallel.decoder import parallelize
from fourfold.parallel.grid import Grid
from fourfold.parallel.pipeline import Pipeline, TiedEnds
from fourfold.parallel.stage import Stage
from fourfold.parallel.state import (
    LocalShard,
    clip_gradients,
    initialize_shards,
    sum_partial_gradients,
)
from fourfold.training.loss_scaling import LossScale
from fourfold.training.optimizer import ShardedAdamW, check_groups, learning_rate


@dataclass(frozen=True)
class MicroBatch:
    """What one forward reads: token and label ids [B, S]; positions and documents [B, S] where they matter.

    Without labels logits are wanted.
    """

    tokens: Tensor
    labels: Tensor | None
    positions: Tensor | None = None
    documents: Tensor | None = None


@dataclass(frozen=True)
class StepResult:
    """Of one step, over all ranks: mean loss of the kept tokens, gradient norm before clipping, kept tokens.

    skipped: fp16 gradients overflowed, and the weights are as before.
    """

    loss: Tensor
    grad_norm: Tensor
    kept_tokens: Tensor
    skipped: bool = False


class Job:
    """A model on the grid with its optimizer.

    stages: this process's pipeline stages by number; the whole model is stage 0 where nothing splits the layers.
    trained: the shards that the optimizer steps, all but what LoRA freezes.
    """

    def __init__(
        self, run: RunConfig, grid: Grid, device: torch.device, stages: dict[int, DataParallel] | None = None
    ) -> None:
        """Give memory to ``stages`` (default: ``meta_stages``); ``initialize`` them then, or load a checkpoint."""
        if run.optimizer.groups:
            check_groups(run.optimizer, trained_shapes(run.model, run.lora))
        self.run, self.grid, self.device = run, grid, device
        self.stages = meta_stages(run, grid) if stages is None else stages
        for stage in self.stages.values():
            stage.materialize(device)
        self.pipeline = Pipeline(self.stages, grid, run, device)
        self.shards: list[LocalShard] = [shard for stage in self.stages.values() for shard in stage.shards()]
        self.trained = [shard for shard in self.shards if shard.parameter.requires_grad]
        self.tied_ends: TiedEnds | None = None
        if run.model.tie_word_embeddings and run.parallel.pp > 1 and not run.lora.rank:
            copies = [shard for shard in self.shards if shard.name == "embed_tokens.weight"]
            self.tied_ends = TiedEnds(copies, grid, run)
        self.optimizer = ShardedAdamW(self.trained, run.optimizer, run.training.seed)
        self.loss_scale: LossScale | None = None
        if run.training.precision == "fp16":
            self.loss_scale = LossScale(run.loss_scaling, run.loss_scaling.initial)

    def initialize(self, seed: int) -> None:
        """Fill the weights; the same seed gives the same weights on every grid."""
        initialize_shards(self.shards, self.run.model, seed)
        self.publish()

    def publish(self) -> None:
        """After the stored weights have changed: the next forward computes with them."""
        for stage in self.stages.values():
            stage.publish()

    def train_step(self, micro_batches: Sequence[MicroBatch], step: int) -> StepResult:
        """Take one optimizer step as the training loop does, without its logs and checkpoints; ``step`` is from 0."""
        kept = self.count_kept(micro_batches)
        loss = self.backward(micro_batches, kept)
        grad_norm = self.clip()
        skipped = not self.update(step, grad_norm)
        return StepResult(loss, grad_norm, kept, skipped)

    def backward(self, micro_batches: Sequence[MicroBatch], kept: Tensor) -> Tensor:
        """Gradients of the mean loss of the step's ``kept`` tokens (times the loss scale); returns that loss."""
        losses: list[Tensor] = []
        scale = (1.0 if self.loss_scale is None else self.loss_scale.scale) / kept.clamp(min=1)
        if self.pipeline.last_stage in self.stages:
            self.stages[self.pipeline.last_stage].model.lm_head.loss_scale = scale

        def forward(stage: int, hidden: Tensor | None, micro_batch: int) -> Tensor:
            out = self.forward(stage, hidden, micro_batches[micro_batch])
            if stage < self.pipeline.last_stage:
                return out
            losses.append(out.detach())
            return out * scale

        self.pipeline.step(forward, len(micro_batches), sequences=len(micro_batches[0].tokens))
        for stage in self.stages.values():
            stage.finish_gradients()
        if self.tied_ends is not None:
            self.tied_ends.sum_gradients()
        sum_partial_gradients(self.shards, self.grid)
        return self.mean_loss(losses, kept)

    def forward(self, stage: int, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """One stage: from tokens or the stage before to hidden states, the sum of the losses, or whole logits."""
        mine = self.my_tokens(micro_batch)
        inputs = mine.tokens if hidden is None else hidden
        return self.stages[stage].model(inputs, mine.labels, mine.positions, mine.documents)

    def my_tokens(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's share of the sequences, where cp splits them. Documents stay whole: attention compares them."""
        cp, tokens, labels = self.grid.cp, micro_batch.tokens, micro_batch.labels
        positions = micro_batch.positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mine = (None if t is None else take_chunks(t, cp.rank, cp.size) for t in (tokens, labels, positions))
        return MicroBatch(*mine, micro_batch.documents)

    def clip(self) -> Tensor:
        """Clip the gradients to ``optimizer.max_grad_norm``; the norm before."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        return clip_gradients(self.shards, self.run.optimizer.max_grad_norm, scale)

    def update(self, step: int, grad_norm: Tensor) -> bool:
        """Step the optimizer with the clipped gradients; False where fp16 overflowed, and they are dropped instead."""
        if self.loss_scale is not None:
            overflowed = not grad_norm.isfinite().item()
            self.loss_scale.update(overflowed)
            if overflowed:
                self.optimizer.drop_gradients()
                return False
        self.optimizer.step(self.learning_rate(step))
        self.publish()
        return True

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Mean loss of the kept tokens over all ranks, without gradients."""
        kept = self.count_kept(micro_batches)
        return self.mean_loss(self.outputs(micro_batches), kept)

    def next_token_logits(self, tokens_BS: Tensor, position: int) -> Tensor:
        """Logits [V] after the token at ``position`` of the first sequence, on every process."""
        micro_batch = MicroBatch(tokens_BS, None)
        at = (self.my_tokens(micro_batch).positions[0] == position).nonzero()
        logits_V = torch.zeros(self.run.model.vocab_size, device=self.device)
        for logits_BSV in self.outputs([micro_batch]):
            if len(at):
                logits_V = logits_BSV[0, int(at[0, 0])].float()
        for axis in (self.grid.cp, self.grid.pp):
            logits_V = all_reduce(logits_V, axis, "logits of one token")
        return logits_V

    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """What the last stage makes of every micro-batch; nothing on the ranks of other stages."""

        def forward(stage: int, hidden: Tensor | None, micro_batch: int) -> Tensor:
            return self.forward(stage, hidden, micro_batches[micro_batch])

        outputs = self.pipeline.forward(forward, len(micro_batches), sequences=len(micro_batches[0].tokens))
        for stage in self.stages.values():
            stage.free_gathered()
        return outputs

    def learning_rate(self, step: int) -> float:
        run = self.run
        return learning_rate(step, run.training.train_steps, run.optimizer.lr, run.lr_scheduler)

    def count_kept(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Tokens of a step, over all ranks, that the loss counts."""
        mine = sum((self.my_tokens(micro_batch).labels != IGNORE_INDEX).sum() for micro_batch in micro_batches)
        return all_reduce(mine, self.grid.tokens, "kept tokens")

    def mean_loss(self, losses: Sequence[Tensor], kept: Tensor) -> Tensor:
        """The sums of losses of the last stage's micro-batches over the tokens of the step, on every process."""
        total = sum(losses, start=torch.zeros((), device=self.device))
        for axis in (self.grid.tokens, self.grid.pp):
            total = all_reduce(total, axis, "loss")
        return total / kept.clamp(min=1)


def build_model(run: RunConfig) -> Transformer:
    """The run's model in the types in which weights are stored; LoRA keeps what it freezes in the step's type."""
    stored = DTYPES[run.training.master_weights]
    if not run.lora.rank:
        return Transformer(run.model).to(stored)
    model = Transformer(run.model).to(DTYPES[run.training.precision])
    add_adapters(model, run.lora, stored)
    return model


def meta_stages(run: RunConfig, grid: Grid) -> dict[int, DataParallel]:
    """This process's part of the model by pipeline stage, without memory; the whole never exists."""
    stages: dict[int, DataParallel] = {}
    for number, layers in enumerate(stage_layers(run.model, run.parallel)):
        if rank_of_stage(number, run.parallel) == grid.pp.rank:
            with torch.device("meta"):
                model = build_model(run)
            stages[number] = parallelize(model if run.parallel.pp == 1 else Stage(model, layers), grid, run)
    return stages
