"""Compute the time of the attention core: scores, softmax, and the weighted sum of values."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Number

BACKWARD = 2.5
"""Time of a fused kernel's backward, relative to its forward. The backward has 2.5 times as many matmuls (five instead
of two), because it recomputes the scores."""

UNFUSED_FORWARD, UNFUSED_BACKWARD = 11.0, 13.0
"""Bytes moved per 16-bit score if one kernel computes the scaled masked softmax, and another kernel applies dropout.

- Forward: write and read scores (4) and probabilities (2 + 2), and write dropout's output and mask (2 + 1).
- Backward: the same, and the gradient of the scores (2).
"""

PLAIN_FORWARD, PLAIN_BACKWARD = 33.0, 30.0
"""Bytes moved per 16-bit score if Megatron-LM's fused softmax does not apply. Then these are separate operations:
scaling (4 bytes), masking (4), conversion to fp32 (6), softmax (8), conversion back (6), and dropout (5). The backward
pass moves the same bytes, except for the mask."""
FUSED_HEADS = 4
"""Megatron-LM's fused softmax needs sequences × heads to be a multiple of this number
(FusedScaleMaskSoftmax.is_kernel_available)."""
PLAIN_KERNELS = 6.0
"""Number of additional kernel launches without the fused softmax, in each direction."""


NARROW, NARROW_FLASH2 = 0.8, 0.9
"""Rate of a fused kernel with a head_dim of 64, relative to its rate with 128, for forward and backward together.
``NARROW`` is for cuDNN and FlashAttention-3, and ``NARROW_FLASH2`` for FlashAttention-2.

Source: Shah et al. 2024, arXiv 2407.08608, figures 5 and 6. In a causal forward pass with 16k tokens and a head_dim of
64, cuDNN, FlashAttention-3, and FlashAttention-2 reach 388, 473, and 299 TFLOP/s. With a head_dim of 128, they reach
539, 616, and 335 TFLOP/s. In the backward pass, the rates for 64 and for 128 are closer.
"""

CAPPED_FORWARD, CAPPED_BACKWARD = 96.0, 154.0
"""Bytes that attention with soft-capping moves per 16-bit score. This attention runs as separate operations
(parallel.attention.block_attention). Each operation reads its operands from memory and writes its result to memory.

- Forward: the matmul (2), conversion to 32 bits (6), scale, divide, tanh, multiply, and mask (8 each), log-sum-exp (24:
  maximum, difference, exponential, sum), the softmax (8 + 8), conversion and the matmul with the values (6 + 2).
- Backward: the scores again, with mask (48), the slopes of tanh (24), the softmax (16), and the matmul that reads it
  (8). Then operations compute the gradient of the softmax's weights (8), subtract its projection (8), and multiply the
  result by the weights (12), by the slopes (12), and by the scale (8). Finally, the product is converted to 16 bits
  (6), and two matmuls read it (4).
"""
CAPPED_KERNELS, CAPPED_KERNELS_BACKWARD = 18.0, 30.0
"""Number of kernel launches in forward and backward for one piece of the queries. Attention with soft-capping runs
piece by piece."""


class Kernel(NamedTuple):
    """A fused attention kernel.

    - share: FLOP/s of the kernel divided by the FLOP/s of the machine's fastest kernel, for long sequences and a
      head_dim of 128.
    - half: number of tokens per sequence at which the kernel reaches half of its FLOP/s for long sequences.
    - narrow: FLOP/s of the kernel with heads narrower than 128, divided by its FLOP/s with a head_dim of 128.
    """

    share: Number
    half: Number
    narrow: Number


def flash_seconds(flops: Number, seq: Number, head_dim: Number, *, rate: Number, kernel: Kernel) -> Number:
    """Return the seconds of a fused kernel in the forward pass.

    Args:
        flops: Number of FLOPs in the forward pass.
        seq: Number of tokens in a sequence.
        head_dim: Number of channels per head.
        rate: FLOP/s of the machine's fastest kernel for long sequences.
        kernel: Speed of the kernel, relative to the machine's fastest kernel.
    """
    width = np.where(head_dim < 128, kernel.narrow, 1.0)
    return flops * (seq + kernel.half) / (seq * rate * kernel.share * width)


def unfused_seconds(
    scores: Number, head_dim: Number, *, rate: Number, bandwidth: Number, moved_per_score: Number
) -> Number:
    """Return the seconds of the attention core, in the forward or in the backward pass, if separate kernels compute it.

    The core has two matmuls: one writes all scores, and one reads them. The first has an inner dimension of only
    ``head_dim``, and the output of the second is only ``head_dim`` wide. So both are assumed to reach half of ``rate``.

    Args:
        scores: Number of scores: sequences · heads · queries · keys.
        head_dim: Number of channels per head.
        rate: FLOP/s of matmuls.
        bandwidth: Memory bandwidth in bytes per second.
        moved_per_score: Bytes that the kernels between the matmuls move per score.
    """
    matmuls = 2 * 2 * scores * head_dim / (0.5 * rate)
    return matmuls + scores * moved_per_score / bandwidth


def capped_seconds(scores: Number, width: Number, *, rate: Number, bandwidth: Number) -> tuple[Number, Number]:
    """Return the seconds of the attention core with soft-capped scores, in forward and backward. The core runs as
    separate operations.

    Args:
        scores: Number of scores: sequences · heads · queries · keys.
        width: Number of channels per head.
        rate: FLOP/s of matmuls.
        bandwidth: Memory bandwidth in bytes per second.
    """
    forward, backward = (
        unfused_seconds(matmuls * scores, width, rate=rate, bandwidth=bandwidth, moved_per_score=moved / matmuls)
        for moved, matmuls in ((CAPPED_FORWARD, 1.0), (CAPPED_BACKWARD, BACKWARD))
    )
    return forward, backward
