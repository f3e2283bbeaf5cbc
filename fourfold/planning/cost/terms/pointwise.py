"""Count the bytes moved by memory-bound operations: norms, residuals, activations, rotary embeddings, and copies.

One pass reads or writes a whole tensor.
"""

from __future__ import annotations

import numpy as np

from fourfold.planning.array_fields import Flag, Number

# The numbers up to BACKWARD describe the forward pass of programs other than fourfold. We have counted the operations
# of a block.
RESIDUAL_PASSES = 12.0
"""Passes over the residual stream: two norms (one read and one write each), two residual sums (two reads and one write
each), and one copy of the two outputs."""
FUSED_RESIDUAL_PASSES = 8.0
"""Passes over the residual stream if a norm and a residual sum are one kernel each."""
HEAD_PASSES = 4.0
"""Passes over queries, keys, and values to rotate them or add biases, and to reorder them for the attention."""
PLAIN_TURNS = 8.0
"""Additional passes over queries and keys if rotary embeddings run as separate operations: products, negation,
concatenation, and sum compute x·cos + (−x₂, x₁)·sin (Megatron-DeepSpeed and Hugging Face in bf16)."""
GELU_PASSES, GATED_PASSES = 4.0, 5.0
"""Passes over the inner width. Without a gate, bias and activation are two operations. With a gate, there are gate, up,
their product, and the sigmoid."""
FUSED_INNER_PASSES = 2.5
BACKWARD = 1.5
"""Number of passes in the backward pass divided by the number in the forward pass: 3 / 2. The backward of a norm reads
the gradient and the input and writes one tensor. The backward of a sum moves nothing."""

# The numbers below are for fourfold's own operations in 16 bits, in forward and backward.
# tests/planning/test_traffic.py counts them, except fused operations and the kernels of norms, which exist only on a
# GPU or with a compiler.
OWN_SUMS = 6.0, 6.0
"""Passes over the residual stream: two residual sums, and the sums of their gradients (two reads and one write
each)."""
OWN_NORMS = 4.0, 10.0
"""Passes over the residual stream by two norms of one kernel each. The forward pass reads and writes the stream. The
gradients of inputs and of weights each read the input and the output's gradient."""
OWN_CHAINS = 10.0, 48.0
"""Passes over the residual stream by two RMSNorms that are chains of operations (``parallel.tensor.norm``) with a
sum over y in between."""
OWN_LAYER_CHAINS = 30.0, 76.0
"""Passes by two LayerNorms that are chains of operations. A LayerNorm has two statistics, in higher precision."""
OWN_HEAD_NORMS = 13.0, 20.0
"""Passes over queries and keys by their norms. Each norm converts them to 32 bits, runs its kernel, and multiplies the
result by the weight in 16 bits."""
OWN_TURNS = 11.5, 11.5
"""Passes over the channels that rotary embeddings rotate, in separate operations with sums in 32 bits
(``models.rope``)."""
OWN_FUSED_TURNS = 2.0, 2.0
"""Passes over the same channels if one kernel computes rotary embeddings and head norms."""
OWN_GATE, OWN_FUSED_GATE = (5.0, 9.0), (3.0, 5.0)
"""Passes over the inner width for silu(gate) · up. The backward pass writes two gradients, one for gate and one for
up."""
OWN_GELU = 2.0, 3.0
"""Passes over the inner width for GELU."""
OWN_BIASES = 2.0, 1.0
"""Passes over outputs to which a bias is added. The backward pass only reads, because the gradient of the bias is a
sum."""

SCORE_PASSES, FUSED_SCORE_PASSES = 8.0, 2.0
"""Passes over the router's scores in fp32, for softmax, the choice of experts, and sums."""
ROW_PASSES = 4.0
"""Passes over the rows of a rank's tokens. The forward pass gathers the rows before it sends them, and sums them with
weights when they return. The backward pass does the reverse."""
SORT_PASSES = 4.0
"""Passes over the rows of a rank's experts if it has several experts: sort the rows by expert, and restore their
order."""
PLACING_PASSES = 2.0
"""Passes that replace ``SORT_PASSES`` and ``ROW_PASSES`` if the exchange delivers rows in the right order, and sums the
rows that return."""
PADDING_PASSES = 4.0
"""Passes over the rows of a rank's experts in 8 bits: pad each expert's rows to a multiple, and remove the padding."""
ROUNDING_PASSES = 2.0
"""Passes, in 16 bits, that round an operand of a matmul to 8 bits by rows and by columns."""
EXPERT_BIAS_PASSES = 6.0, 8.0
"""Passes over the rows of a rank's experts that add biases to the experts' outputs, one expert at a time, in
Megatron-LM (_apply_bias in megatron/core/transformer/moe/experts.py). The forward writes the bias times the router's
weights, adds it (two reads and one write), and concatenates the experts (one read and one write). The backward
concatenates the gradients. For the gradients of biases and of weights, it also writes a product (one read and one
write) and sums it."""
EXPERT_GATE_PASSES = 3.0, 6.0
"""Passes of programs other than fourfold over the experts' width. The forward pass reads gate and up, and writes their
product times the router's weights. The backward pass reads the product's gradient, gate, and up, writes their
gradients, and computes the product again for the gradients of the router's weights."""


def others_bytes(
    residual: Number, heads: Number, turned: Number, inner: Number, gated: Flag, fused: Flag
) -> tuple[Number, Number]:
    """Return the bytes that one block moves in forward and backward in programs other than fourfold.

    The arguments are sizes of tensors on the rank, in bytes: the residual stream, queries, keys, and values
    (``heads``), the channels that rotary embeddings rotate (``turned``), and the inner width of the MLP.
    """
    residual_passes = np.where(fused, FUSED_RESIDUAL_PASSES, RESIDUAL_PASSES)
    inner_passes = np.where(fused, FUSED_INNER_PASSES, np.where(gated, GATED_PASSES, GELU_PASSES))
    turns = np.where(fused, 0, PLAIN_TURNS)
    forward = residual_passes * residual + HEAD_PASSES * heads + turns * turned + inner_passes * inner
    return forward, BACKWARD * forward


def own_bytes(
    residual: Number, turned: Number, normed: Number, biased: Number, inner: Number, *,
    gated: Flag, fused: Flag, core_fused: Flag, chains: Flag, layer_norm: Flag,
) -> tuple[Number, Number]:  # fmt: skip
    """Return the bytes that fourfold's own block moves in forward and backward.

    Args:
        turned: Number of bytes that rotary embeddings rotate.
        normed: Number of bytes that head norms read.
        biased: Number of bytes to which biases are added.
        core_fused: Whether the operations between the attention's matmuls are fused.
        chains: Whether norms are chains of separate operations.
    """

    def passes(direction: int) -> Number:
        chain = np.where(layer_norm, OWN_LAYER_CHAINS[direction], OWN_CHAINS[direction])
        norms = np.where(chains, chain, OWN_NORMS[direction])
        turns = np.where(core_fused, OWN_FUSED_TURNS[direction], OWN_TURNS[direction])
        head_norms = np.where(core_fused, 0, OWN_HEAD_NORMS[direction])
        gate = np.where(fused, OWN_FUSED_GATE[direction], OWN_GATE[direction])
        activation = np.where(gated, gate, OWN_GELU[direction])
        return (
            (OWN_SUMS[direction] + norms) * residual
            + turns * turned
            + head_norms * normed
            + activation * inner
            + OWN_BIASES[direction] * biased
        )

    return passes(0), passes(1)


def expert_bytes(
    scores: Number, sent: Number, here: Number, inner: Number, *,
    is_own: Flag, fused: Flag, in_8: Flag, in_place: Flag, several: Flag, biased: Flag,
) -> tuple[Number, Number, Number]:  # fmt: skip
    """Return the bytes moved between the matmuls of a router and its experts in forward and in backward, and the
    bytes moved by the forward's activation.

    Args:
        scores: Number of bytes of the router's scores.
        sent: Number of bytes of the rows of a rank's tokens.
        here: Number of bytes of the rows of the rank's experts.
        inner: Number of bytes of the same rows inside the experts, where a row has the expert's intermediate size.
        is_own: Whether the program uses fourfold's own operations.
        fused: Whether it uses fused operations.
        in_8: Whether matmuls run in 8 bits.
        in_place: Whether exchanges put rows into order, and matmuls compute the activation and round.
        several: Whether a rank has several experts.
        biased: Whether separate operations add biases to the experts' outputs.
    """
    passes = np.where(fused, FUSED_SCORE_PASSES, SCORE_PASSES)
    in_place = np.asarray(in_place, bool)
    gates = [
        np.where(is_own, np.where(fused, OWN_FUSED_GATE[way], OWN_GATE[way]),
                 np.where(in_place, 0.0, EXPERT_GATE_PASSES[way]))
        for way in (0, 1)
    ]  # fmt: skip
    sorting = np.where(several, SORT_PASSES, 0.0) + np.where(in_8, PADDING_PASSES, 0.0)
    moved = passes * scores + np.where(in_place, PLACING_PASSES * here, ROW_PASSES * sent + sorting * here)
    rounding = np.where(in_8 & ~in_place, ROUNDING_PASSES, 0.0)
    biased = np.where(in_place, 0.0, biased)
    forward = moved + gates[0] * inner + rounding * (here + inner) + biased * EXPERT_BIAS_PASSES[0] * here
    backward = moved + gates[1] * inner + rounding * (here + 2 * inner)
    # The gradient of the biases before the activation is a sum over the gradients of gate and up.
    backward = backward + biased * (EXPERT_BIAS_PASSES[1] * here + 2 * inner)
    return forward, backward, gates[0] * inner
