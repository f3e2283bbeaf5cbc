"""Seconds of what is limited by memory: norms, residuals, activations, rotary embeddings, copies."""

from __future__ import annotations

import numpy as np

from fourfold.planning.machine import Number

# Passes over a tensor (a read or a write of all of it) in the forward, counted in the operations of a block.
RESIDUAL_PASSES = 12.0
"""Two norms (read, write), two residual sums (read twice, write), and the two outputs copied once."""
FUSED_RESIDUAL_PASSES = 8.0
"""Norm and residual sum in one kernel each."""
HEAD_PASSES = 4.0
"""Of queries, keys and values: rotate or add biases, and lay out for the attention."""
GELU_PASSES, GATED_PASSES = 4.0, 5.0
"""Of the inner width: bias and activation as two operations; gate, up, their product and the sigmoid."""
FUSED_INNER_PASSES = 2.5
BACKWARD = 1.5
"""A norm's backward reads the gradient and the input and writes one tensor, a sum's only passes on: 3 for 2."""


def pointwise_bytes(residual: Number, heads: Number, inner: Number, gated: Number, fused: Number) -> Number:
    """Bytes moved in one block's forward, of tensors of ``residual``, ``heads`` and ``inner`` bytes on the rank."""
    residual_passes = np.where(fused, FUSED_RESIDUAL_PASSES, RESIDUAL_PASSES)
    inner_passes = np.where(fused, FUSED_INNER_PASSES, np.where(gated, GATED_PASSES, GELU_PASSES))
    return residual_passes * residual + HEAD_PASSES * heads + inner_passes * inner
