"""Run a model and its optimizer on the grid: forward, backward, clip, update, and evaluate. If the run file has a
section [dpo], the model is trained on preferences: pairs of a chosen and a rejected answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.checkpoints.global_tensors import TrainingState
from fourfold.checkpoints.saved_state import BestValidation, RecentSteps
from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.config.stages import rank_of_stage, stage_layers
from fourfold.data.loader import MicroBatch
from fourfold.heartbeat import doing
from fourfold.matmul_tuning.matmul_choice import agreed_layouts
from fourfold.models.dtypes import DTYPES
from fourfold.models.lora import add_adapters, check_targets, trained_shapes
from fourfold.models.mixture import Mixture
from fourfold.models.transformer import Transformer
from fourfold.parallel.attention.context import share_of_sequences
from fourfold.parallel.data.data_parallel import DataParallel
from fourfold.parallel.decoder import parallelize_decoder
from fourfold.parallel.experts.expert_load import ExpertLoad
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.pipeline.pipeline import EmbeddingCopies, Pipeline, copies_as_one
from fourfold.parallel.state import initialize_shards
from fourfold.parallel.tensor.matmul_layouts import Layouts
from fourfold.parallel.tensor.preference_head import PreferenceHead
from fourfold.training.later_losses import LaterLosses
from fourfold.training.loss_scaling import LossScale
from fourfold.training.optimizer import ShardedOptimizer, check_groups, learning_rate
from fourfold.training.weight_average import WeightAverage


@dataclass(frozen=True)
class StepResult:
    """The results of one step, over all ranks."""

    loss: Tensor
    """The mean loss over the tokens that all masks keep. With [dpo], the mean loss over pairs."""

    grad_norm: Tensor
    """The global gradient norm before clipping."""

    kept_tokens: Tensor
    """The number of tokens in the loss. With [dpo], the number of pairs."""

    skipped: bool = False
    """True if the batch was left out, or if fp16 gradients overflowed in ``train_step``. False for bad steps, which the
    trainer handles."""

    @classmethod
    def none(cls, device: torch.device) -> StepResult:
        """Return the result of a step whose batch is left out: NaN for the loss and the gradient norm, and 0 tokens."""
        nan = torch.tensor(math.nan, device=device)
        return cls(nan, nan, torch.zeros((), device=device), skipped=True)


class Job(TrainingState):
    """A model on the grid, with its optimizer. All processes must call the methods together, in the same order."""

    def __init__(
        self, run: RunConfig, grid: Grid, device: torch.device, stages: dict[int, DataParallel] | None = None
    ) -> None:
        """Allocate memory for the model and its optimizer. The caller then calls ``initialize`` or loads a checkpoint.

        Args:
            run: The run's settings.
            grid: The grid of processes.
            device: This process's device.
            stages: This process's pipeline stages by index, on the meta device. If None, ``meta_stages`` builds them.
                Their matmuls then use the fastest memory layouts that are known for this machine.

        Raises:
            UserError: A parameter group or a LoRA target matches no parameter.
        """
        if run.optimizer.groups:
            check_groups(run.optimizer, trained_shapes(run.model, run.lora))
        self.run = run
        stages = meta_stages(run, grid, agreed_layouts(run, device)) if stages is None else stages
        super().__init__(stages, grid, device)
        self.pipeline = Pipeline(self.stages, grid, run, device) if run.parallel.pp > 1 else None
        is_tied, depths = run.model.tie_word_embeddings, run.model.num_nextn_predict_layers
        has_copy = (is_tied or depths > 0) and self.pipeline is not None
        if has_copy:
            self.shards = copies_as_one(self.shards, is_tied)
        self.trained = [shard for shard in self.shards if shard.parameter.requires_grad]
        """The shards that the optimizer updates. LoRA freezes all other shards."""
        if has_copy and not run.lora.rank:
            copies = [shard for shard in self.shards if shard.name == "embed_tokens.weight"]
            self.embedding_copies = EmbeddingCopies(copies, grid, run)
        self.optimizer: ShardedOptimizer = ShardedOptimizer(self.trained, run, grid)
        self.loss_scale: LossScale | None = None
        if run.training.precision == "fp16":
            self.loss_scale = LossScale(run.loss_scaling, run.loss_scaling.initial)
        self.later_losses = LaterLosses(run, grid, device) if depths else None
        self.recent, self.best = RecentSteps(), BestValidation()
        self.copies = None
        self.average: WeightAverage | None = WeightAverage(self.trained, run.ema.decay) if run.ema.decay else None
        self.expert_load: ExpertLoad | None = None
        if run.model.num_experts:
            self.expert_load = ExpertLoad(run, grid, device)
            for stage in self.stages.values():
                self.expert_load.watch(stage.model)

    def initialize(self, seed: int) -> None:
        """Initialize the weights. The same seed gives the same weights on every grid."""
        initialize_shards(self.shards, self.run.model, seed)
        self.publish()

    def train_step(self, micro_batches: Sequence[MicroBatch[Tensor]], step: int) -> StepResult:
        """Take one optimizer step. Use this method to train without a ``Trainer``.

        Args:
            micro_batches: This rank's micro-batches.
            step: Index of the step (the first step is 0). It determines the learning rate.
        """
        kept = self.count_kept(micro_batches)
        loss = self.forward_backward(micro_batches, kept)
        norm = self.clip()
        moved = self.update(step, norm)
        return StepResult(loss, norm, kept, skipped=not moved)

    def forward_backward(self, micro_batches: Sequence[MicroBatch[Tensor]], kept: Tensor) -> Tensor:
        """Compute the gradients of a step's mean loss, and return the loss.

        Args:
            micro_batches: This rank's micro-batches.
            kept: Number of tokens in the loss over all ranks, from ``count_kept``. With [dpo], the number of pairs.
        """
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        weights: Tensor | float = 1.0
        if self.later_losses is not None:
            weights, kept = self.later_losses.weights, torch.cat([kept[None], self.later_losses.count(micro_batches)])
        scale = factor * weights / kept.clamp(min=1)
        if self.expert_load is not None:
            self.expert_load.begin(factor, micro_batches)
        if self.pipeline is None:
            losses = []
            for number, micro_batch in enumerate(micro_batches, start=1):
                loss = self.forward(micro_batch, scale)
                self.stages[0].begin_backward(last=number == len(micro_batches))
                (loss * scale).sum().backward()
                losses.append(loss.detach())
        else:
            losses = self.pipeline.forward_backward(micro_batches, scale)
        self.finish_gradients()
        if self.expert_load is not None:
            self.expert_load.finish()
        mean = self.mean_loss(losses, kept)
        return mean if self.later_losses is None else self.later_losses.note(mean)

    def forward(self, micro_batch: MicroBatch[Tensor], loss_scale: Tensor | float = 1.0) -> Tensor:
        """Run the model on one micro-batch, without a pipeline.

        Args:
            micro_batch: Tokens [B, S] and, for a loss, labels [B, S].
            loss_scale: The factor that the caller multiplies the loss by before the backward pass.

        Returns:
            - With labels: the sum of the token losses, or with [dpo] the sum of the pairs' losses. With D prediction
              layers, the sums of the model and of each of these layers, [1 + D].
            - With [dpo] and labels, but without ``reference`` in the micro-batch: the log-probability of each answer
              [B].
            - Without labels: the logits.
        """
        doing("forward and backward of a micro-batch")
        inputs = (micro_batch.tokens, micro_batch.labels, micro_batch.positions, micro_batch.document_ends)
        more = (micro_batch.reference, micro_batch.is_data, micro_batch.next_tokens, micro_batch.next_labels)
        result: Tensor = self.stages[0].model(*inputs, loss_scale, None, *more)
        return result

    def clip(self) -> Tensor:
        """Clip the gradients to ``optimizer.max_grad_norm``, and return the norm before clipping."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        return self.clip_gradients(self.run.optimizer.max_grad_norm, scale)

    def update(self, step: int, grad_norm: Tensor | float) -> bool:
        """Step the optimizer with the clipped gradients.

        Returns:
            False if fp16 gradients overflowed. In this case, the gradients were dropped, and the weights are unchanged.

        Raises:
            UserError: Gradients overflow even at the smallest loss scale.
        """
        if self.copies is not None:
            self.copies.join()
            self.copies = None
        if self.loss_scale is not None:
            # If grad_norm is a tensor, this line waits for the device.
            overflowed = not math.isfinite(grad_norm)
            self.loss_scale.update(overflowed)
            if overflowed:
                return self.skip_update()
        self.optimizer.step(self.learning_rate(step))
        if self.expert_load is not None:
            self.expert_load.advance(self.shards)
        if self.average is not None:
            self.average.update()
        self.publish()
        return True

    def skip_update(self) -> bool:
        """Drop the gradients, and return False. The weights, moments, and loss scale stay as they are."""
        self.optimizer.drop_gradients()
        return False

    def evaluate(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> Tensor:
        """Compute the mean loss of the micro-batches of all ranks, without gradients. The mean is over the tokens that
        all masks keep, or with [dpo] over pairs."""
        kept = self.count_kept(micro_batches)
        return self.mean_loss(self.outputs(micro_batches), kept)

    def take_preferences(self) -> dict[str, float]:
        """Return DPO metrics over all pairs on all ranks since the previous call.

        Returns:
            The mean margin (``dpo_margin``), the fraction of pairs with a positive margin (``dpo_accuracy``), and the
            mean reward of the chosen answers (``dpo_chosen_reward``). The margin of a pair is the chosen answer's
            reward minus the rejected answer's reward. Empty without [dpo], or if there were no pairs.
        """
        if not self.run.dpo.beta:
            return {}
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for stage in self.stages.values():
            head = stage.model.lm_head
            if isinstance(head, PreferenceHead) and head.figures is not None:
                sums, head.figures = sums + head.figures, None
        for axis in (self.grid.batch, self.grid.pp):
            sums = all_reduce(sums, axis, "figures of preferences")
        pairs, margins, above, rewards = sums.tolist()
        names = ("dpo_margin", "dpo_accuracy", "dpo_chosen_reward")
        return dict(zip(names, (total / pairs for total in (margins, above, rewards)), strict=True)) if pairs else {}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the moving averages in place of the weights while the block runs."""
        assert self.average is not None
        with self.average.in_place_of_weights():
            self.publish()
            yield
        self.publish()

    def next_token_logits(self, tokens_BS: Tensor, position: int) -> Tensor:
        """Return the logits [V] after the token at ``position`` of the first sequence, on every process."""
        positions_1S = torch.arange(tokens_BS.shape[1], device=self.device)[None]
        mine = share_of_sequences(MicroBatch(tokens_BS, positions=positions_1S), self.grid.cp)
        assert mine.positions is not None
        found = (mine.positions[0] == position).nonzero()
        logits_V = torch.zeros(self.run.model.vocab_size, device=self.device)
        for logits_BSV in self.outputs([mine]):
            if len(found):
                logits_V = logits_BSV[0, int(found[0, 0])].float()
        for axis in (self.grid.cp, self.grid.pp):
            logits_V = all_reduce(logits_V, axis, "logits of one token")
        return logits_V

    @torch.no_grad()
    def outputs(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> list[Tensor]:
        """Run a forward pass over every micro-batch in evaluation mode.

        Experts take all the tokens that are routed to them, because ``moe.capacity_factor`` applies only to training.

        Returns:
            The outputs of the last pipeline stage, one for each micro-batch. On ranks of other stages, the list is
            empty.
        """
        micro_batches = [replace(batch, next_tokens=None, next_labels=None) for batch in micro_batches]
        try:
            for stage in self.stages.values():
                stage.model.eval()
            if self.pipeline is not None:
                outputs = self.pipeline.forward(micro_batches)
            else:
                outputs = [self.forward(micro_batch) for micro_batch in micro_batches]
        finally:
            for stage in self.stages.values():
                stage.model.train()
        self.free_gathered()
        return outputs

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (the first step is 0)."""
        run = self.run
        return learning_rate(step, run.training.train_steps, run.optimizer.lr, run.lr_scheduler)

    def count_kept(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> Tensor:
        """Count the tokens in a step's loss over all ranks. With [dpo], count the pairs."""
        labels = [micro_batch.labels for micro_batch in micro_batches if micro_batch.labels is not None]
        if self.run.dpo.beta:
            # Fill the tensor on the device, because a copy from the host would wait for the device.
            pairs = torch.full((), sum(len(labels_BS) for labels_BS in labels) // 2, device=self.device)
            return all_reduce(pairs, self.grid.batch, "pairs of answers")
        mine = torch.stack([(labels_BS != IGNORE_INDEX).sum() for labels_BS in labels]).sum()
        return all_reduce(mine, self.grid.tokens, "kept tokens")

    def mean_loss(self, losses: Sequence[Tensor], kept: Tensor) -> Tensor:
        """Return the mean loss over all ranks: the sum of the ranks' losses, divided by ``kept``."""
        total = sum(losses, start=torch.zeros(kept.shape, device=self.device))
        for axis in (self.grid.tokens, self.grid.pp):
            total = all_reduce(total, axis, "loss")
        return total / kept.clamp(min=1)


def build_model(run: RunConfig, layers: range | None = None) -> Transformer:
    """Build a run's model, or some of its layers, in plain torch.

    Trained weights have the dtype ``training.master_weights``. Weights that LoRA freezes have the dtype
    ``training.precision``.
    """
    stored = DTYPES[run.training.master_weights]
    model = Transformer(run.model, layers).to(DTYPES[run.training.precision] if run.lora.rank else stored)
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        mixture.capacity_factor = run.moe.capacity_factor
    if run.lora.rank:
        add_adapters(model, run.lora, stored)
    return model


def meta_stages(run: RunConfig, grid: Grid, layouts: Layouts | None = None) -> dict[int, DataParallel]:
    """Build this process's pipeline stages on the meta device. No process ever builds the full model.

    Args:
        run: The run's settings.
        grid: The grid of processes.
        layouts: Memory layouts of the blocks' matmuls. They must be the same on every process.

    Returns:
        The stages of this process, by the index of the stage.
    """
    layers_of_stages = stage_layers(run.model, run.parallel)
    if run.lora.targets is not None:
        check_targets(run.model, run.lora, layers_of_stages)
    stages: dict[int, DataParallel] = {}
    for number, layers in enumerate(layers_of_stages):
        if rank_of_stage(number, run.parallel) == grid.pp.rank:
            with torch.device("meta"):
                model = build_model(run, layers)
            stages[number] = parallelize_decoder(model, grid, run, layouts)
    return stages
