"""Workloads to predict: models, layouts, steps and programs, as arrays with one entry for each case."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from fourfold.config.stages import FORWARDS_FIRST, IN_ROUNDS, SPLIT_BACKWARD, V_SHAPED
from fourfold.planning.array_fields import Cases, Number
from fourfold.planning.program_flags import OWN_PROGRAM, Program

RECOMPUTE = ("none", "selective", "full")
"""Values of ``Layout.recompute``: selective runs parts of a block again in the backward, full the whole block."""

SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
"""Values of ``Layout.schedule``; 1F1B with several chunks per stage is Interleaved1F1B."""

OPTIMIZERS = ("adamw", "muon", "lion")
"""Values of ``Step.optimizer``."""

CP_METHODS = ("gathered", "ring", "ulysses")
"""Values of ``Layout.cp_method``: keys and values all-gathered (other programs), passed around a ring, or heads
exchanged for tokens."""


@dataclass(frozen=True)
class ModelShape(Cases):
    """The sizes of a decoder."""

    layers: Number
    hidden: Number
    queries: Number
    """Features of all query heads."""
    keys: Number
    """Features of all key heads; those of the values are as many."""
    head_dim: Number
    inner: Number
    """Width of a dense MLP; 0: there is none."""
    gate_up: Number
    """Outputs of the MLP's first product: 2 · inner with a gate, else inner."""
    vocab: Number
    """Rows of the vocabulary, padding included."""
    tied: Number
    """Embedding and head share one table."""
    rope: Number = 1
    """Rotary tables: those of sliding layers may be others; 0: positions are learned."""
    rotary_share: Number = 1.0
    """Share of a head's channels that rotary embeddings rotate."""
    positions: Number = 0
    """Rows of a learned position table."""
    biases: Number = False
    """q, k and v have biases."""
    head_norms: Number = False
    """Queries and keys are normalized."""
    joint_head_norms: Number = False
    """They are normalized over all heads at once."""
    layer_norm: Number = False
    """LayerNorm instead of RMSNorm."""
    zero_centered: Number = False
    """Norms multiply by 1 + weight."""
    parallel_residual: Number = False
    """Attention and MLP read the same input."""
    norms: Number = 2
    """Norms of a block, without those of queries and keys."""
    output_norms: Number = False
    """Some are of what attention and MLP return."""
    window: Number = 0
    """Tokens that a query of a sliding layer sees."""
    sliding: Number = 0
    """Share of the blocks that slide."""
    caps_scores: Number = False
    """The attention's scores are capped."""
    caps_logits: Number = False
    """The head's logits are capped."""
    experts: Number = 0
    """Experts of a block, of which each token passes some; 0: there are none."""
    chosen: Number = 0
    """Experts that a token passes."""
    expert_inner: Number = 0
    """Width of an expert, which has a gate."""
    shared_inner: Number = 0
    """Width of the shared expert, a gated MLP that every token passes; 0: there is none."""
    shared_gate: Number = False
    """Its output is multiplied by a gate of the token's own."""
    sparse: Number = 0
    """Share of the blocks that have experts."""

    @property
    def dense_first(self) -> Number:
        """Blocks of a mixture of experts that have a dense MLP, before all others."""
        return np.where(np.greater(self.sparse, 0), np.rint(self.layers * (1 - self.sparse)), 0)

    def keys_seen(self, seq: Number) -> Number:
        """Keys that a query sees in a sequence, the mean over queries and blocks: the causal half, or the window."""
        window = np.minimum(self.window, seq)
        return (1 - self.sliding) * seq / 2 + self.sliding * window * (1 - window / np.maximum(2 * seq, 1))

    @property
    def mean_inner(self) -> Number:
        """Width of the MLP that every token passes, dense or shared: the mean over all blocks."""
        return (1 - self.sparse) * self.inner + self.sparse * self.shared_inner

    @property
    def mean_gate_up(self) -> Number:
        """Outputs of its first product."""
        return (1 - self.sparse) * self.gate_up + self.sparse * 2 * self.shared_inner

    @property
    def mlps(self) -> Number:
        """Share of the blocks that have such an MLP."""
        return (1 - self.sparse) * (self.inner > 0) + self.sparse * (self.shared_inner > 0)

    @property
    def block_weights(self) -> Number:
        """Matrix entries of one block (the mean of all) without those of its experts."""
        router = self.sparse * self.experts
        return self.hidden * (2 * self.queries + 2 * self.keys + self.mean_gate_up + self.mean_inner + router)

    @property
    def expert_weights(self) -> Number:
        """Matrix entries of all experts of one block (the mean of all)."""
        return self.experts * self.sparse * 3 * self.hidden * self.expert_inner

    @property
    def active_weights(self) -> Number:
        """Matrix entries of one block (the mean of all) that a token is multiplied by."""
        return self.block_weights + self.chosen * self.sparse * 3 * self.hidden * self.expert_inner


@dataclass(frozen=True)
class Layout(Cases):
    """A division of a model and its batch over the GPUs."""

    x: Number = 1
    y: Number = 1
    z: Number = 1
    dp: Number = 1
    cp: Number = 1
    pp: Number = 1
    ep: Number = 1
    """Neighbors among the ranks of dp · cp · z that divide the experts."""
    interleave: Number = 1
    """Chunks of layers (stages) on each rank of pp."""
    schedule: Number = 0
    """Index into ``SCHEDULES``."""
    zero: Number = 0
    """ZeRO stage over dp · cp."""
    cp_method: Number = 0
    """Index into ``CP_METHODS``."""
    micro_batch: Number = 1
    """Sequences."""
    batch_parts: Number = 1
    """Parts of a micro-batch whose collectives of x and y run behind the products of the others."""
    recompute: Number = 0
    """Index into ``RECOMPUTE``."""
    recompute_every: Number = 1
    """Every n-th block recomputes."""
    offload: Number = False
    """Full recompute keeps its block inputs in the host's memory."""
    ends: Number = 0.0
    """Layers' worth of work that embedding and head each count for in the split of layers into stages."""
    layers_per_stage: tuple[int, ...] | None = None
    """Explicit split of a single layout, from its run file."""

    @property
    def gpus(self) -> Number:
        return self.x * self.y * self.z * self.dp * self.cp * self.pp

    @property
    def shards(self) -> Number:
        """The ranks that a weight is sharded over, besides x and y."""
        return self.z * np.where(self.zero > 0, self.dp * self.cp, 1)

    @property
    def split_backward(self) -> Number:
        """True where weight gradients are computed apart from input gradients."""
        return _is_one_of(self.schedule, SPLIT_BACKWARD) & (np.asarray(self.pp) > 1)

    @property
    def in_rounds(self) -> Number:
        """True where the schedule runs micro-batches in rounds of pp."""
        return _is_one_of(self.schedule, IN_ROUNDS) & (np.asarray(self.pp) > 1)

    @property
    def forwards_first(self) -> Number:
        """True where the schedule runs all forwards before the first backward."""
        return _is_one_of(self.schedule, FORWARDS_FIRST)

    @property
    def v_shaped(self) -> Number:
        """True where the first and the last stage are both on the first rank."""
        return _is_one_of(self.schedule, V_SHAPED)

    @property
    def recomputing(self) -> Number:
        """Share of the blocks that recompute."""
        return 1 / self.recompute_every


@dataclass(frozen=True)
class Step(Cases):
    """Batch and precision of one optimizer step."""

    seq: Number = 1
    """Tokens of a sequence."""
    batch: Number = 1
    """Sequences of the global batch."""
    bits: Number = 16
    """16 or 32; 8: matrix products in FP8, everything else in 16."""
    reduce_bytes: Number = 4
    """Bytes per gradient entry in sums, over micro-batches and over ranks."""
    weight_bytes: Number = 4
    """Bytes per entry of a stored weight; a complete gradient has at least as many."""
    moment_bytes: Number = 4
    """Bytes per entry of each of the optimizer's moments."""
    optimizer: Number = 0
    """Index into ``OPTIMIZERS``."""
    averaged: Number = False
    """A moving average of the weights is kept, in 32 bits."""
    capacity: Number = 0.0
    """An expert takes at most so many times its equal share of the tokens; 0: all that choose it."""
    imbalance: Number = 1.0
    """Tokens of the fullest rank of ep over their mean."""

    @property
    def item_bytes(self) -> Number:
        """Bytes per entry of an activation, or of a weight in use."""
        return np.maximum(self.bits, 16) / 8


@dataclass(frozen=True)
class Workload(Cases):
    """One optimizer step: every field of its four parts is a number, or an array [n] of them."""

    model: ModelShape
    layout: Layout = Layout()
    step: Step = Step()
    program: Program = OWN_PROGRAM

    def but(self, **changes: Number) -> Self:
        """A copy with some fields changed, each in the part that has it: ``work.but(x=2, seq=4096)``."""
        parts: dict[str, dict[str, Number]] = {}
        for name, value in changes.items():
            parts.setdefault(PART_OF[name], {})[name] = value
        return replace(self, **{part: replace(getattr(self, part), **values) for part, values in parts.items()})

    def point(self, index: int | np.ndarray) -> Self:
        """One case, with plain numbers in place of NumPy's narrow ones."""
        point = self.take(np.array(index))
        numbers = {name: value.item() for name, value in vars(point.layout).items() if isinstance(value, np.generic)}
        return point.but(**numbers)

    @property
    def micro_batches(self) -> Number:
        """Micro-batches that one rank runs in a step."""
        layout = self.layout
        return self.step.batch / layout.micro_batch / (layout.z * layout.dp)  # a product of three may exceed 32 bits

    @property
    def parts(self) -> Number:
        """Parts of a micro-batch that take turns; one where nothing is split over x and y."""
        return np.where(self.layout.x * self.layout.y > 1, self.layout.batch_parts, 1)

    @property
    def together(self) -> Number:
        """Sequences of one part: all, where they are too few to divide, and a part is some tokens of each."""
        whole = self.layout.micro_batch
        return np.where(whole % self.parts == 0, whole // self.parts, whole)

    @property
    def parts_are_tokens(self) -> Number:
        """Parts of a micro-batch are tokens of all its sequences, and attention runs once for all of them."""
        return (self.parts > 1) & (self.together == self.layout.micro_batch)

    @property
    def passes_blocks(self) -> Number:
        """Parts of a micro-batch enter a block while others are in the one before; recomputed blocks wait for all."""
        return (self.parts > 1) & np.not_equal(self.layout.recompute, RECOMPUTE.index("full"))

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one rank, gathered over x."""
        return self.layout.micro_batch * self.step.seq / self.layout.cp

    @property
    def table_weights(self) -> Number:
        """Entries of embedding and head on a rank that has them: one table in a pipeline, or where they are tied."""
        both = np.equal(self.layout.pp, 1) & ~np.asarray(self.model.tied, bool)
        return self.model.vocab * self.model.hidden * np.where(both, 2, 1)

    @property
    def tokens_per_step(self) -> Number:
        return 1.0 * self.step.batch * self.step.seq

    @property
    def token_matrices(self) -> Number:
        """Matrix entries that a token is multiplied by: the blocks' and the head's, padded rows included."""
        gates = self.model.sparse * self.model.shared_gate * self.model.hidden
        return self.model.layers * (self.model.active_weights + gates) + self.model.vocab * self.model.hidden

    @property
    def token_attention(self) -> Number:
        """FLOPs of one token's attention to the keys that it sees, in the forward of all blocks."""
        return 4.0 * self.model.layers * self.model.keys_seen(self.step.seq) * self.model.queries

    def model_flops(self) -> Number:
        """Count the FLOPs of one step that the model needs: three forwards, without recompute.

        MFU is made of these, in plans as in the logs of runs (``training.flops``).
        """
        return self.tokens_per_step * 3 * (2 * self.token_matrices + self.token_attention)

    def hardware_flops(self) -> Number:
        """Add to the model FLOPs what the layout recomputes. HFU is made of these."""
        model, recompute, attention = self.model, self.layout.recompute, self.token_attention
        last = self.program.recompute_stops_early * (1 - 1 * model.output_norms) * model.hidden * model.mean_inner
        full = 2 * model.layers * (model.active_weights - last) + attention
        selective = np.where(self.program.recomputes_attention, attention, 0)
        again = np.where(recompute == 2, full, np.where(recompute == 1, selective, 0))
        return self.model_flops() + self.tokens_per_step * again * self.layout.recomputing

    def megatron_flops(self) -> Number:
        """Count as Megatron-LM publishes: everything recomputed, whatever the layout recomputes, and no causal mask.

        Only for comparison with published figures (Narayanan et al. 2021, arXiv 2104.04473, equation 3).
        """
        model = self.model
        attention = 16.0 * model.layers * self.step.seq * model.queries
        blocks = 8 * model.layers * model.active_weights
        return self.tokens_per_step * (blocks + attention + 6 * model.vocab * model.hidden)


PARTS = {"model": ModelShape, "layout": Layout, "step": Step, "program": Program}
PART_OF = {field.name: part for part, kind in PARTS.items() for field in fields(kind)}
"""The part of a workload that has a field."""
assert len(PART_OF) == sum(len(fields(kind)) for kind in PARTS.values()), "fields of a workload have unique names"


def _is_one_of(schedule: Number, names: tuple[str, ...]) -> Number:
    return np.isin(schedule, [SCHEDULES.index(name) for name in names])
