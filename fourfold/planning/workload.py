"""What is predicted: models, batches and layouts, as arrays with one entry for each case."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.config.stages import FORWARDS_FIRST, SPLIT_BACKWARD, V_SHAPED
from fourfold.planning.cases import Cases, Number

RECOMPUTE = ("none", "selective", "full")
"""``recompute`` counts in these: selective runs parts of a block again, full the whole block."""

SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
"""``schedule`` counts in these; 1F1B with several chunks a stage is Interleaved1F1B."""

CONTEXTS = ("gathered", "ring", "ulysses")
"""``context`` counts in these: keys and values gathered (others' programs), passed round, or heads exchanged."""


@dataclass(frozen=True)
class Workload(Cases):
    """Sizes of one step; every field is a number or an array [n] of them.

    The model: layers, hidden, queries and keys (features), head_dim, inner, ups (outputs of up and gate together),
    vocab (padded), tied, rope, biases (of q, k, v), head_norms, positions (rows of a learned table), parallel_residual
    (attention and MLP read the same).
    The step: seq, batch (global, sequences), micro_batch, bits (16 or 32 in the step; 8: matmuls in FP8), reduce_bytes
    (of a gradient in sums), recompute (index into ``RECOMPUTE``).
    The grid: x, y, z, dp, cp, pp, interleave (chunks of layers a stage), zero, schedule (index into ``SCHEDULES``),
    context (into ``CONTEXTS``).

    What the program does, as others' programs differ here:
    split_residual: the stream between the layers lies over x; false for tensor without sequence parallelism.
    regather: inputs are kept split over x and gathered again for the backward, whatever the recompute (Megatron-LM's
    sequence parallelism).
    flash: fused attention; fused: fused pointwise operations; per_op: selective keeps the attention's output and every
    second matmul's (torchtitan); attention_again, mlp_again, gathers_again: what selective does again; stops_early:
    full leaves out a block's last product and its sum over x, which nothing reads; products_add: the products of the
    weight gradients add them to those of the micro-batches before; fused_gate: a gated MLP keeps gate, up and what it
    makes of them, and no activation between; fused_loss: the loss reads 16-bit logits; inputs_in_8: products in FP8
    keep their inputs as they read them (Transformer Engine); stage_keeps: residuals that a stage of a pipeline keeps of
    a micro-batch besides those of its blocks; own: fourfold's own operations, which are counted, and not others', which
    are estimated (``terms.pointwise``); of its model layer_norm, zero_centered (norms), turned (share of the channels
    that rotary embeddings turn); gate_first: the sum of gate over y runs behind the product of up; all_reduced:
    gradients are summed whole over dp where each rank keeps a shard.
    overlap_x, overlap_z, overlap_dp: communication runs behind computation (of x in the backward; overlap_forward:
    also in the forward, piece by piece with the product that it feeds); blocking: the host waits for every kernel.
    weights_kept: weights are gathered once a step and not for every micro-batch (distributed optimizers).
    half_weights: 16-bit weights are stored besides the optimizer's; stored: bytes of a weight, of its gradient and of
    each of the optimizer's moments where they are not; gradient_copy: the optimizer makes an fp32 copy of its gradients
    (DeepSpeed); stored_gradients: bytes of a gradient where they are not those of the sums.
    ends: how many layers' worth of work embedding and head each count for where layers are split into stages;
    layers_per_stage: of one layout, where its run file says them. every: only every n-th block recomputes; offload:
    what full recompute keeps waits in the host's memory.
    prefetch: blocks gathered ahead; chunk_logits: logits made at once; count_runtime: memory includes what the driver
    and the communication library take.
    """

    layers: Number
    hidden: Number
    queries: Number
    keys: Number
    head_dim: Number
    inner: Number
    ups: Number
    vocab: Number
    tied: Number
    seq: Number
    batch: Number
    micro_batch: Number
    bits: Number
    reduce_bytes: Number
    x: Number
    y: Number
    z: Number
    dp: Number
    cp: Number
    pp: Number
    interleave: Number
    zero: Number
    recompute: Number
    split_residual: Number = True
    flash: Number = True
    fused: Number = False
    overlap_x: Number = True
    overlap_forward: Number = False
    overlap_z: Number = True
    overlap_dp: Number = True
    weights_kept: Number = False
    regather: Number = False
    ends: Number = 0.0
    layers_per_stage: tuple[int, ...] | None = None
    schedule: Number = 0
    context: Number = 0
    every: Number = 1
    offload: Number = False
    rope: Number = True
    biases: Number = False
    head_norms: Number = False
    positions: Number = 0
    parallel_residual: Number = False
    blocking: Number = False
    half_weights: Number = False
    stored: Number = 4
    gradient_copy: Number = False
    stored_gradients: Number = 0
    count_runtime: Number = True
    per_op: Number = False
    prefetch: Number = 1
    chunk_logits: Number = 1 << 27
    attention_again: Number = True
    mlp_again: Number = False
    gathers_again: Number = False
    stops_early: Number = False
    products_add: Number = False
    fused_gate: Number = False
    fused_loss: Number = False
    inputs_in_8: Number = False
    stage_keeps: Number = 0
    own: Number = False
    layer_norm: Number = False
    zero_centered: Number = False
    turned: Number = 1.0
    all_reduced: Number = False
    gate_first: Number = False

    @property
    def gpus(self) -> Number:
        return self.x * self.y * self.z * self.dp * self.cp * self.pp

    @property
    def micro_batches(self) -> Number:
        """Micro-batches that one rank runs in a step."""
        return self.batch / self.micro_batch / (self.z * self.dp)  # a product of three may exceed 32 bits

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on one rank, gathered over x."""
        return self.micro_batch * self.seq / self.cp

    @property
    def bytes(self) -> Number:
        """Bytes of an activation or a weight in the step."""
        return np.maximum(self.bits, 16) / 8

    @property
    def block_weights(self) -> Number:
        """Matrix entries of one block."""
        return self.hidden * (2 * self.queries + 2 * self.keys + self.ups + self.inner)

    @property
    def table_weights(self) -> Number:
        """Entries of embedding and head on a rank that has them: of one on a pipeline, or where they are one."""
        both = np.equal(self.pp, 1) & ~np.asarray(self.tied, bool)
        return self.vocab * self.hidden * np.where(both, 2, 1)

    @property
    def split_backward(self) -> Number:
        """Whether weight gradients are computed apart from input gradients."""
        return _is_one_of(self.schedule, SPLIT_BACKWARD) & (np.asarray(self.pp) > 1)

    @property
    def forwards_first(self) -> Number:
        """Whether the schedule runs all forwards before the first backward."""
        return _is_one_of(self.schedule, FORWARDS_FIRST)

    @property
    def v_shaped(self) -> Number:
        """Whether the first and the last stage meet on the first rank."""
        return _is_one_of(self.schedule, V_SHAPED)

    @property
    def recomputing(self) -> Number:
        """Share of the blocks that recompute."""
        return 1 / self.every

    def model_flops(self) -> Number:
        """Of one step: matmul parameters (head included) six times a token, attention over half of the square."""
        tokens = 1.0 * self.batch * self.seq
        attention = 6.0 * self.layers * self.seq * self.queries
        return tokens * (6 * (self.layers * self.block_weights + self.vocab * self.hidden) + attention)

    def hardware_flops(self) -> Number:
        """Model FLOPs and what is computed again for the backward."""
        tokens = 1.0 * self.batch * self.seq
        attention = 2.0 * self.layers * self.seq * self.queries
        last = np.where(self.stops_early, self.hidden * self.inner, 0)
        full = 2 * self.layers * (self.block_weights - last) + attention
        selective = np.where(self.attention_again, attention, 0)
        again = np.where(self.recompute == 2, full, np.where(self.recompute == 1, selective, 0))
        return self.model_flops() + tokens * again * self.recomputing

    def megatron_flops(self) -> Number:
        """Hardware FLOPs with everything recomputed and the whole square of the attention (Narayanan et al. 2021,
        arXiv 2104.04473, equation 3), the convention of many published figures."""
        tokens = 1.0 * self.batch * self.seq
        attention = 16.0 * self.layers * self.seq * self.queries
        return tokens * (8 * self.layers * self.block_weights + attention + 6 * self.vocab * self.hidden)


def _is_one_of(schedule: Number, names: tuple[str, ...]) -> Number:
    return np.isin(schedule, [SCHEDULES.index(name) for name in names])
