"""Count the bytes moved by memory-bound operations: norms, residuals, activations, rotary embeddings, and copies.

A *pass* reads or writes a full tensor once. A token has one *row* for each expert that it is routed to. *Routing
weights* are the router's factors for the outputs of these experts.
"""

import numpy as np

from fourfold.planning.array_fields import Flag, Number

# The constants from here to BACKWARD are for frameworks other than fourfold. All of them except BACKWARD describe the
# forward pass.
RESIDUAL_PASSES = 12.0
"""Passes over the residual stream: two norms (one read and one write each), two residual sums (two reads and one write
each), and copies of the outputs of attention and MLP (two passes)."""
FUSED_RESIDUAL_PASSES = 8.0
"""Passes over the residual stream if each norm is fused with a residual sum into one kernel (two reads and two
writes)."""
HEAD_PASSES = 4.0
"""Passes over queries, keys, and values to rotate them or add biases, and to reorder them for the attention."""
PLAIN_TURNS = 8.0
"""Additional passes over queries and keys if rotary embeddings run as separate operations: x·cos + (−x₂, x₁)·sin takes
multiplications, a negation, a concatenation, and a sum (Megatron-DeepSpeed, and Hugging Face in bf16)."""
GELU_PASSES, GATED_PASSES = 4.0, 5.0
"""Passes over tensors of the MLP's inner width. Without a gate, bias and activation are two operations. With a gate,
the tensors are gate, up, their product, and the sigmoid of gate."""
FUSED_INNER_PASSES = 2.5
"""Passes over tensors of the MLP's inner width if bias, activation, and gate are fused."""
BACKWARD = 1.5
"""Ratio of passes in the backward pass to passes in the forward pass, 3 / 2. A norm's forward pass has one read and one
write. Its backward pass reads the output's gradient and the input, and writes the input's gradient. The backward pass
of a sum moves nothing."""

# The constants from here to OWN_BIASES are for fourfold's operations in 16 bits, each for the forward pass and the
# backward pass. tests/planning/test_traffic.py counts the passes, except for fused operations and norm kernels, which
# need a compiler or a GPU.
OWN_SUMS = 6.0, 6.0
"""Passes over the residual stream: two residual sums, and the sums of their gradients (two reads and one write
each)."""
OWN_NORMS = 4.0, 10.0
"""Passes over the residual stream by two norms of one kernel each.

In the forward pass, a norm reads and writes the stream once. In the backward pass, it computes the gradient of its
input and the gradient of its weight. Each computation reads the input and the output's gradient, and the first one
writes its result.
"""
OWN_CHAINS = 10.0, 48.0
"""Passes over the residual stream by two RMSNorms that run as chains of separate operations (``parallel.tensor.norm``),
with a sum over y in between."""
OWN_LAYER_CHAINS = 30.0, 76.0
"""Passes over the residual stream by two LayerNorms that run as chains of separate operations. A LayerNorm has two
statistics, which are computed in higher precision."""
OWN_HEAD_NORMS = 13.0, 20.0
"""Passes over queries and keys by their norms. Each norm converts them to 32 bits, runs its kernel, and multiplies the
result by the weight in 16 bits."""
OWN_TURNS = 11.5, 11.5
"""Passes over the channels that rotary embeddings rotate, as separate operations that add in 32 bits
(``models.rope``)."""
OWN_FUSED_TURNS = 2.0, 2.0
"""Passes over the rotated channels if a single kernel computes both the rotary embeddings and the head norms."""
OWN_GATE, OWN_FUSED_GATE = (5.0, 9.0), (3.0, 5.0)
"""Passes over tensors of the MLP's inner width for silu(gate) · up. The backward pass writes the gradients of gate and
of up."""
OWN_GELU = 2.0, 3.0
"""Passes over tensors of the MLP's inner width for GELU."""
OWN_BIASES = 2.0, 1.0
"""Passes over outputs that a bias is added to. The backward pass only reads the output's gradient, because the gradient
of the bias is the sum of this gradient over tokens."""

SCORE_PASSES, FUSED_SCORE_PASSES = 8.0, 2.0
"""Passes over the router's scores in fp32, for softmax, the choice of experts, and sums: with separate operations, and
with fused operations."""
ROW_PASSES = 4.0
"""Passes over the rows of a rank's tokens. The forward pass gathers the rows before it sends them, and sums them with
their routing weights when they return. The backward pass does the reverse."""
SORT_PASSES = 4.0
"""Passes over the rows of a rank's experts if it has several experts: sort the rows by expert, and restore their
order."""
PLACING_PASSES = 2.0
"""Passes over the rows of a rank's experts if the exchange delivers rows in the right order and sums the rows that
return. These passes replace ``SORT_PASSES`` and ``ROW_PASSES``."""
PADDING_PASSES = 4.0
"""Passes over the rows of a rank's experts if matmuls run in 8 bits: pad the rows of each expert to a multiple of the
tile size, and remove the padding."""
ROUNDING_PASSES = 2.0
"""Passes over a 16-bit operand of a matmul to round it to 8 bits, once by rows and once by columns."""
EXPERT_BIAS_PASSES = 6.0, 8.0
"""Passes over the rows of a rank's experts to add biases to the experts' outputs, one expert at a time, in Megatron-LM
(_apply_bias in megatron/core/transformer/moe/experts.py). The forward writes the bias times the routing weights, adds
it (two reads and one write), and concatenates the experts' outputs (one read and one write). The backward concatenates
the gradients. For the gradients of biases and of routing weights, it also writes a product (one read and one write) and
sums it."""
EXPERT_GATE_PASSES = 3.0, 6.0
"""Passes over tensors of the experts' inner width in frameworks other than fourfold. The forward pass reads gate and
up, and writes silu(gate) · up times the routing weights. The backward pass reads the product's gradient, gate, and up,
writes their gradients, and computes the product again for the gradients of the routing weights."""


def others_bytes(
    residual: Number, heads: Number, turned: Number, inner: Number, gated: Flag, fused: Flag
) -> tuple[Number, Number]:
    """Return the bytes that one block moves in forward and backward in frameworks other than fourfold.

    Args:
        residual: Bytes of the residual stream on the rank.
        heads: Bytes of queries, keys, and values.
        turned: Bytes of the channels that rotary embeddings rotate.
        inner: Bytes of a tensor of the MLP's inner width.
        gated: Whether the MLP has a gate.
        fused: Whether pointwise operations are fused.
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
    """Return the bytes that one block moves in forward and backward in fourfold. The arguments that are not listed are
    as in ``others_bytes``.

    Args:
        normed: Bytes of the queries and keys that norms read. 0 without such norms.
        biased: Bytes of the outputs that biases are added to.
        core_fused: Whether one kernel computes the norms and the rotary embeddings of queries and keys.
        chains: Whether the norms of the residual stream are chains of separate operations.
        layer_norm: Whether norms are LayerNorm instead of RMSNorm.
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
    """Return the bytes that a router and its experts move between their matmuls. The three numbers are for the forward
    pass, for the backward pass, and for the activation in the forward pass.

    Args:
        scores: Bytes of the router's scores.
        sent: Bytes of the rows that a rank sends. A token has one row for each expert that it is routed to.
        here: Bytes of the rows that the rank's experts read.
        inner: Bytes of the rows of ``here`` inside the experts. There, each row has the expert's inner width.
        is_own: Whether the framework is fourfold.
        fused: Whether pointwise operations are fused.
        in_8: Whether matmuls run in 8 bits.
        in_place: Whether exchanges deliver rows in the right order, and matmul kernels compute the activation and
            round.
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
    # The gradient of gate's bias is a sum over the rows of gate's gradient, and the same is true for up. So the
    # gradients of gate and up are read once more.
    backward = backward + biased * (EXPERT_BIAS_PASSES[1] * here + 2 * inner)
    return forward, backward, gates[0] * inner
