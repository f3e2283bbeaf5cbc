"""Seconds of the attention core: scores, softmax, and the weighted sum of values."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machine import Number

SHORT = 640.0
"""Tokens at which a fused kernel reaches half its best rate: FlashAttention-2's figures for 512 to 16k tokens."""

BACKWARD = 2.5
"""Matrix products of a fused kernel's backward for two of its forward: five, scores computed again."""

UNFUSED_FORWARD, UNFUSED_BACKWARD = 11.0, 13.0
"""Bytes moved for each score in 16 bits by scaled masked softmax and dropout as kernels of their own: scores written
and read (4), probabilities (2 + 2), dropout's output and mask (2 + 1); backward as much and the scores' gradient."""


def flash_seconds(flops: Number, seq: Number, head_dim: Number, *, rate: Number) -> Number:
    """Forward of a fused kernel; ``flops`` of one forward. Heads of 64 reach four fifths of the rate of 128."""
    width = np.where(head_dim < 128, 0.8, 1.0)
    return flops * (seq + SHORT) / (seq * rate * width)


def unfused_seconds(
    scores: Number, head_dim: Number, *, rate: Number, bandwidth: Number, moved_per_score: float
) -> Number:
    """One direction of the unfused core with ``scores`` = sequences × heads × queries × keys: its two products move
    the scores, and their depth (or width) is only ``head_dim``."""
    products = 2 * 2 * scores * head_dim / (0.5 * rate)
    return products + scores * moved_per_score / bandwidth
