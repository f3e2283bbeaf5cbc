"""Compute the memory and the time of linear attention. Split a hybrid model into its two kinds of blocks: blocks with
softmax attention and blocks with linear attention.

The *core* of linear attention is everything between its input and output projections. It processes each sequence in
chunks of ``LINEAR_CHUNK`` tokens.
"""

from typing import NamedTuple

import numpy as np

from fourfold.config.layout import LINEAR_CHUNK
from fourfold.planning.array_fields import Number
from fourfold.planning.cost.rates import Rates
from fourfold.planning.workload import Workload


def has_linear(work: Workload) -> bool:
    """Return whether at least one case of ``work``, such as one layout, has blocks with linear attention."""
    return bool(np.any(work.model.linear))


def mean_of_kinds(work: Workload, softmax: Number, linear: Number) -> Number:
    """Return the mean of a quantity over all blocks, given its value in blocks with softmax attention and its value in
    blocks with linear attention."""
    return (1 - work.model.linear) * softmax + work.model.linear * linear


def kinds_of_attention(work: Workload) -> tuple[Workload, Workload]:
    """Return two workloads: one whose blocks all have softmax attention, and one whose blocks all have linear
    attention.

    In the second workload, the field ``queries`` is the width of the values, because the output gate of linear
    attention is as wide as its values. The number of heads stays the same, because the y ranks divide both kinds of
    attention in the same way.
    """
    model = work.model
    has = np.greater(model.linear, 0)
    values = np.where(has, model.linear_values, model.queries)
    linear = work.but(
        linear=np.where(has, 1.0, 0.0), queries=values, keys=np.where(has, model.linear_keys, model.keys),
        head_dim=values * model.head_dim / model.queries, output_gate=True, qk_norm=False, attention_bias=False,
        rotated=0, sliding=0, caps_scores=False, flash=True,
    )  # fmt: skip
    return work.but(linear=0.0, sliding=model.sliding / np.maximum(1 - model.linear, 1e-30)), linear


class PerToken(NamedTuple):
    """A quantity of the core of linear attention, such as the bytes that it saves, as a sum of five terms.

    Each field is the quantity per entry of one tensor. For example, ``keys`` is the number of bytes per channel of a
    key. ``of`` multiplies each field by its tensor's number of entries per token, adds up the terms, and multiplies the
    sum by the number of tokens.
    """

    keys: float
    """The quantity per channel of the keys of all heads."""
    queries_of_heads: float
    """The quantity per channel of the queries, after each query head is repeated for all value heads that share it."""
    values: float
    """The quantity per channel of the values of all heads."""
    pairs: float
    """The quantity per value head and pair of tokens. A pair is a token and any token of its chunk."""
    states: float
    """The quantity per entry of a chunk's states. All tokens of the chunk share these entries, so the number of entries
    per token is the number of entries divided by the tokens of a chunk."""

    def of(self, work: Workload) -> Number:
        """Return the quantity for one block and for a rank's share of a micro-batch."""
        model, layout = work.model, work.layout
        heads = model.linear_num_value_heads
        one = (
            self.keys * model.linear_keys
            + self.queries_of_heads * heads * model.linear_key_head_dim
            + self.values * model.linear_values
            + self.pairs * heads * LINEAR_CHUNK
            + self.states * model.linear_states / LINEAR_CHUNK
        )
        return one * work.tokens / (layout.x * layout.y)


SAVED = PerToken(48.0, 40.0, 52.0, 24.6, 4.0)
"""Bytes that the core saves for its backward pass, in fp32. The core is always recomputed, so only one block has these
bytes in memory at a time."""
COPIES = PerToken(0.0, 0.0, 2.0, 0.0, 0.0)
"""Bytes that the core saves in addition if the step computes in 16 bits: two tensors as wide as the values."""
GRADIENTS = PerToken(0.0, 0.0, 12.0, 0.0, 0.0)
"""Bytes that the backward pass of the core adds to the saved bytes at its peak, in fp32."""
MOVED, MOVED_BACKWARD = PerToken(308.0, 172.0, 306.0, 87.0, 41.0), PerToken(595.0, 261.0, 484.0, 197.0, 81.0)
"""Bytes that the operations of the core read and write in forward and backward. These numbers and the numbers above are
counted from the operations that ``models.delta_net`` runs in bf16, with four taps per convolution."""
KERNELS, KERNELS_BACKWARD = 154.0, 222.0
"""Number of operations of the core in forward and backward, without the operations that run once per chunk."""
KERNELS_OF_A_CHUNK, KERNELS_OF_A_CHUNK_BACKWARD = 12.0, 15.0
"""Number of operations that run once per chunk, in forward and backward."""


def saved_by_core(work: Workload) -> Number:
    """Return the bytes that the core of one block saves while it is recomputed, or 0 for softmax attention."""
    if not has_linear(work):
        return 0.0
    saved = SAVED.of(work) + np.where(work.step.item_bytes == 2, COPIES.of(work), 0.0)
    return np.where(work.model.linear == 1, saved, 0.0)


def core_seconds(work: Workload, rates: Rates) -> tuple[Number, Number]:
    """Return the seconds of the core of one block with linear attention, in forward and backward, or 0 for softmax
    attention. The time of the recomputation is not included.

    Let D be the width of a key head, and E the width of a value head. Per token and head, the matmuls with the state
    have 3 · D · E multiply-adds. The matmuls inside a chunk have 5 · D + 3 · E multiply-adds for each token of the
    chunk. The backward pass has two matmuls for each matmul of the forward pass.
    """
    if not has_linear(work):
        return 0.0, 0.0
    model = work.model
    inside = LINEAR_CHUNK * (5 * model.linear_key_head_dim + 3 * model.linear_value_head_dim)
    flops = model.linear_num_value_heads * inside + 6 * model.linear_states
    flops = flops * work.tokens / (work.layout.x * work.layout.y)
    forward, backward = (
        np.where(model.linear == 1, times * flops / rates.router + moved.of(work) / rates.bandwidth, 0.0)
        for times, moved in ((1, MOVED), (2, MOVED_BACKWARD))
    )
    return forward, backward


def core_launches(work: Workload) -> tuple[Number, Number]:
    """Return the number of kernels that the core launches in forward and backward, or 0 for softmax attention. The
    recomputation is not included."""
    if not has_linear(work):
        return 0.0, 0.0
    chunks = np.ceil(work.step.seq_length / LINEAR_CHUNK)
    forward, backward = (
        np.where(work.model.linear == 1, kernels + of_a_chunk * chunks, 0.0)
        for kernels, of_a_chunk in ((KERNELS, KERNELS_OF_A_CHUNK), (KERNELS_BACKWARD, KERNELS_OF_A_CHUNK_BACKWARD))
    )
    return forward, backward
