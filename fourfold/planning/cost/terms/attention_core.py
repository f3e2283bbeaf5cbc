"""Seconds of the attention core: scores, softmax, and the weighted sum of values."""

from __future__ import annotations

import numpy as np

from fourfold.planning.cases import Number

SHORT = 640.0
"""Tokens at which a fused kernel reaches half its best rate: FlashAttention-2's figures for 512 to 16k tokens."""

BACKWARD = 2.5
"""Matrix products of a fused kernel's backward for two of its forward: five, scores computed again."""

UNFUSED_FORWARD, UNFUSED_BACKWARD = 11.0, 13.0
"""Bytes moved for each score in 16 bits by separate kernels for scaled masked softmax and dropout: scores written
and read (4), probabilities (2 + 2), dropout's output and mask (2 + 1); backward as much and the scores' gradient."""

PLAIN_FORWARD, PLAIN_BACKWARD = 33.0, 30.0
"""The same where Megatron-LM's fused softmax does not apply, so that scaling, masking, conversion to 32 bits, softmax
and conversion back are separate operations: 4 + 4 + 6 + 8 + 6 bytes, dropout 5; backward as much without the mask."""
FUSED_HEADS = 4
"""The fused kernel (FusedScaleMaskSoftmax.is_kernel_available) needs sequences × heads in multiples of this."""
PLAIN_KERNELS = 6.0
"""Operations that the fused kernel saves in each direction."""


def flash_seconds(flops: Number, seq: Number, head_dim: Number, *, rate: Number) -> Number:
    """Forward of a fused kernel; ``flops`` of one forward. Heads of 64 reach four fifths of the rate of 128."""
    width = np.where(head_dim < 128, 0.8, 1.0)
    return flops * (seq + SHORT) / (seq * rate * width)


def unfused_seconds(
    scores: Number, head_dim: Number, *, rate: Number, bandwidth: Number, moved_per_score: Number
) -> Number:
    """One direction of the unfused core with ``scores`` = sequences × heads × queries × keys: its two products move
    the scores, and their depth (or width) is only ``head_dim``."""
    products = 2 * 2 * scores * head_dim / (0.5 * rate)
    return products + scores * moved_per_score / bandwidth
