"""Describe the planner's workloads: models, layouts, steps, and training frameworks. Their fields can be arrays with
one entry per case, such as one entry per layout. x, y, z, dp, cp, pp, and ep are the axes of the grid."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from fourfold.config.stages import FORWARDS_FIRST, IN_ROUNDS, SPLIT_BACKWARD, V_SHAPED
from fourfold.planning.array_fields import ArrayFields, Flag, Number
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.program_flags import OWN_PROGRAM, Program

RECOMPUTE = ("none", "selective", "full")
"""Names of the recompute modes, indexed by ``Layout.recompute``. The backward pass recomputes nothing, parts of a block
(selective), or all of it (full)."""

SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
"""Names of the pipeline schedules, indexed by ``Layout.schedule``. With several stages per rank, 1F1B becomes
Interleaved1F1B."""

OPTIMIZERS = ("adamw", "muon", "lion")
"""Names of the optimizers, indexed by ``Step.optimizer``."""

CP_METHODS = ("gathered", "ring", "ulysses")
"""Names of the context-parallel methods, indexed by ``Layout.cp_method``: all-gather keys and values (only in
frameworks other than fourfold), pass them around a ring, or divide the heads among the cp ranks (Ulysses)."""


@dataclass(frozen=True)
class Layout(ArrayFields):
    """How a model and its batch are divided over the GPUs, and what is recomputed. The fields from ``x`` to ``ep`` are
    sizes of the grid's axes."""

    x: Number = 1
    y: Number = 1
    z: Number = 1
    dp: Number = 1
    cp: Number = 1
    pp: Number = 1
    ep: Number = 1
    """Number of ranks that the experts are divided over. These ranks are neighbors among the dp · cp · z ranks."""
    stages_per_rank: Number = 1
    """Number of stages (groups of consecutive layers) per pipeline rank."""
    schedule: Number = 0
    """Index into ``SCHEDULES``."""
    zero: Number = 0
    """ZeRO stage, for sharding over the dp · cp ranks."""
    cp_method: Number = 0
    """Index into ``CP_METHODS``."""
    micro_batch_size: Number = 1
    """Number of sequences per micro-batch."""
    batch_parts: Number = 1
    """Number of parts of a micro-batch. The collectives of one part over x and y run during another part's matmuls."""
    recompute: Number = 0
    """Index into ``RECOMPUTE``."""
    recompute_every: Number = 1
    """Only every n-th block recomputes."""
    offload: Flag = False
    """Whether full recompute stores the inputs of blocks in host memory."""
    end_layers: Number = 0.0
    """When layers are divided into stages, the embedding and the head each count as this number of layers."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers in each stage, if a run file sets it. This must be None if the other fields are arrays."""

    @property
    def gpus(self) -> Number:
        return self.x * self.y * self.z * self.dp * self.cp * self.pp

    @property
    def shards(self) -> Number:
        """Return the number of shards that a tile is divided into. A tile is the part of a weight for one position of x
        and y. The number is z, or z · dp · cp if ``zero`` also shards weights or optimizer states."""
        return self.z * np.where(self.zero > 0, self.dp * self.cp, 1)

    @property
    def split_backward(self) -> Flag:
        """Return whether the schedule computes weight gradients in a separate pass, after the input gradients."""
        return _is_one_of(self.schedule, SPLIT_BACKWARD) & (np.asarray(self.pp) > 1)

    @property
    def in_rounds(self) -> Flag:
        """Return whether the schedule runs the micro-batches in rounds of at least pp micro-batches
        (``config.stages.IN_ROUNDS``)."""
        return _is_one_of(self.schedule, IN_ROUNDS) & (np.asarray(self.pp) > 1)

    @property
    def forwards_first(self) -> Flag:
        """Return whether the schedule runs all forward passes before the first backward pass."""
        return _is_one_of(self.schedule, FORWARDS_FIRST)

    @property
    def v_shaped(self) -> Flag:
        """Return whether the first and the last stage are both on the first rank."""
        return _is_one_of(self.schedule, V_SHAPED)

    @property
    def recomputing(self) -> Number:
        """Return the fraction of the blocks that recompute."""
        return 1 / self.recompute_every


@dataclass(frozen=True)
class Step(ArrayFields):
    """Batch, precision, and optimizer of one training step."""

    seq_length: Number = 1
    """Number of tokens per sequence."""
    global_batch_size: Number = 1
    """Number of sequences in the global batch."""
    bits: Number = 16
    """Bits of the computation's precision: 16 or 32. With 8, matmuls run in FP8 and everything else in 16 bits."""
    reduce_bytes: Number = 4
    """Bytes per gradient entry while gradients are summed over micro-batches and ranks."""
    weight_bytes: Number = 4
    """Bytes per entry of a stored weight. Once a gradient is fully summed, it has at least as many bytes per entry."""
    moment_bytes: Number = 4
    """Bytes per entry of each optimizer moment."""
    optimizer: Number = 0
    """Index into ``OPTIMIZERS``."""
    averaged: Flag = False
    """Whether the run stores a 32-bit moving average of the weights."""
    capacity: Number = 0.0
    """Capacity factor: an expert processes at most this many times its equal share of the tokens. 0 sets no limit."""
    imbalance: Number = 1.0
    """Number of tokens on the ep rank with the most tokens, divided by the mean over the ep ranks."""

    @property
    def item_bytes(self) -> Number:
        """Return the bytes per entry of an activation, or of a weight that a layer computes with."""
        return np.maximum(self.bits, 16) / 8


@dataclass(frozen=True)
class Workload(ArrayFields):
    """One training step, described by a model, a layout, a step, and a program. Every field of these four parts is a
    scalar or an array [n], except ``layers_per_stage``."""

    model: ModelShape
    layout: Layout = Layout()
    step: Step = Step()
    program: Program = OWN_PROGRAM

    def but(self, **changes: Number | tuple[int, ...] | None) -> Self:
        """Return a copy with some fields of any of the four parts changed: ``work.but(x=2, seq_length=4096)``."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            parts.setdefault(PART_OF[name], {})[name] = value
        return replace(self, **{part: replace(getattr(self, part), **values) for part, values in parts.items()})

    def point(self, index: int | np.ndarray) -> Self:
        """Return one case. The layout's fields become Python numbers, because NumPy's 32-bit integers could
        overflow."""
        point = self.take(np.array(index))
        numbers = {name: value.item() for name, value in vars(point.layout).items() if isinstance(value, np.generic)}
        return point.but(**numbers)

    @property
    def micro_batches(self) -> Number:
        """Return the number of micro-batches that one rank runs in a step."""
        layout = self.layout
        # Divide twice, because the product of the three divisors can overflow 32 bits.
        return self.step.global_batch_size / layout.micro_batch_size / (layout.z * layout.dp)

    @property
    def active_parts(self) -> Number:
        """Return the number of batch parts that hide each other's collectives. It is 1 if x = y = 1, because there are
        no collectives to hide."""
        return np.where(self.layout.x * self.layout.y > 1, self.layout.batch_parts, 1)

    @property
    def sequences_per_part(self) -> Number:
        """Return the number of sequences in one batch part. If the sequences of a micro-batch cannot be divided evenly,
        every part holds some tokens of each sequence, so the number is the micro-batch size."""
        whole = self.layout.micro_batch_size
        return np.where(whole % self.active_parts == 0, whole // self.active_parts, whole)

    @property
    def parts_are_tokens(self) -> Flag:
        """Return whether batch parts split the tokens of each sequence, instead of whole sequences. Attention then runs
        once for all parts."""
        return (self.active_parts > 1) & (self.sequences_per_part == self.layout.micro_batch_size)

    @property
    def parts_cross_blocks(self) -> Flag:
        """Return whether batch parts can be in two blocks at the same time. With full recompute, each block waits for
        all parts."""
        return (self.active_parts > 1) & np.not_equal(self.layout.recompute, RECOMPUTE.index("full"))

    @property
    def tokens(self) -> Number:
        """Return the number of tokens of a micro-batch on one rank, after an all-gather over the tensor axis x."""
        return self.layout.micro_batch_size * self.step.seq_length / self.layout.cp

    @property
    def block_weights(self) -> Number:
        """Return the mean number of weight entries in the matrices of a block, without the experts.

        This is x · y times the number on one rank. So projections to latents count x times, because each rank of x
        holds a copy of them.
        """
        return self.model.block_weights + (self.layout.x - 1) * self.model.hidden_size * self.model.latents

    @property
    def table_weights(self) -> Number:
        """Return the number of weight entries of the embedding and the head on a rank that has at least one of them,
        before x and y split the weights. If embedding and head are tied or if pp > 1, this is one matrix, and otherwise
        two. The last rank also has the prediction layers' projections, and a copy of the embedding for these layers."""
        untied, predicts = ~np.asarray(self.model.tie_word_embeddings, bool), np.greater(self.model.predictions, 0)
        both = untied & (np.equal(self.layout.pp, 1) | predicts)
        tables = self.model.padded_vocab_size * self.model.hidden_size * np.where(both, 2, 1)
        return tables + self.layout.x * self.model.projection_weights  # Each rank of x has a copy of the projections.

    @property
    def tokens_per_step(self) -> Number:
        return 1.0 * self.step.global_batch_size * self.step.seq_length

    @property
    def token_matrices(self) -> Number:
        """Return the number of weight entries in all matrices that take part in the matmuls of one token. These
        matrices are in the blocks and in the padded head. Prediction layers call the head too."""
        gates = self.model.sparse * self.model.shared_expert_gate * self.model.hidden_size
        head = self.model.padded_vocab_size * self.model.hidden_size * (1 + self.model.predictions)
        blocks = self.model.num_hidden_layers * (self.model.active_weights + gates)
        return blocks + head + self.model.projection_weights

    @property
    def token_attention(self) -> Number:
        """Return the forward FLOPs of one token's attention in all blocks, counting only the keys that the token
        attends to.

        In linear attention, each entry of a state takes three multiply-adds per token: to read the value of the token's
        key, to update the state, and to compute the output.
        """
        features = 2.0 * (self.model.queries + self.model.values)
        states = 6.0 * self.model.linear * self.model.linear_states
        return self.model.num_hidden_layers * (self.model.keys_seen(self.step.seq_length) * features + states)

    def model_flops(self) -> Number:
        """Return the model FLOPs of a step: three times the forward pass, without recompute. MFU in plans and logs uses
        this count."""
        return self.tokens_per_step * 3 * (2 * self.token_matrices + self.token_attention)

    def hardware_flops(self) -> Number:
        """Return the model FLOPs of a step plus the FLOPs that the layout recomputes. HFU uses this count."""
        model, recompute, attention = self.model, self.layout.recompute, self.token_attention
        last = self.program.recompute_stops_early * (1 - 1 * model.output_norms) * model.hidden_size * model.mean_inner
        full = 2 * model.num_hidden_layers * (model.active_weights - last) + attention
        selective = np.where(self.program.recomputes_attention, attention, 0)
        again = np.where(recompute == 2, full, np.where(recompute == 1, selective, 0))
        return self.model_flops() + self.tokens_per_step * again * self.layout.recomputing

    def megatron_flops(self) -> Number:
        """Return the FLOPs of a step as Megatron-LM counts them: always with full recompute and without a causal mask.

        Use this count only to compare with published results (Narayanan et al. 2021, arXiv 2104.04473, equation 3).
        """
        model = self.model
        layers = model.num_hidden_layers - model.predictions
        attention = 16.0 * layers * self.step.seq_length * model.queries
        blocks = 8 * layers * model.active_weights
        return self.tokens_per_step * (blocks + attention + 6 * model.padded_vocab_size * model.hidden_size)


PARTS = {"model": ModelShape, "layout": Layout, "step": Step, "program": Program}
PART_OF = {field.name: part for part, kind in PARTS.items() for field in fields(kind)}
"""For each field name, the part of a workload that the field belongs to."""
assert len(PART_OF) == sum(len(fields(kind)) for kind in PARTS.values()), "fields of a workload have unique names"


def _is_one_of(schedule: Number, names: tuple[str, ...]) -> Flag:
    return np.isin(schedule, [SCHEDULES.index(name) for name in names])
