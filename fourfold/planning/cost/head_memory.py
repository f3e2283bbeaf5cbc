"""Compute the memory of the head and the loss on one rank."""

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.tensor_sizes import tensor_bytes
from fourfold.planning.workload import Workload


def head_bytes(work: Workload) -> Number:
    """Return the peak bytes of head and loss: the hidden states of the tokens, the gradient of the hidden states, the
    fp32 gradient of the head's weight, and the logits of one chunk of tokens."""
    model, layout, step, program = work.model, work.layout, work.step, work.program
    p = tensor_bytes(work)
    columns = model.padded_vocab_size / layout.x
    weights = columns * model.hidden_size / layout.y
    rows = np.minimum(work.tokens, np.maximum(1, np.floor(program.chunk_logits / columns / layout.y)) * layout.y)
    # While the loss of a chunk is computed, these tensors are in memory: the partial logits before the sum over y,
    # the sums in fp32, the gradient of the logits in the step's dtype, and the result of the matmul with this gradient.
    # fourfold's kernels overwrite the sums with the gradient.
    sums = np.where(program.fused_loss, 0, 4 / layout.y)
    in_place = step.item_bytes * (1 + np.where(layout.y > 1, 1 / layout.y, 0))
    is_ours = np.logical_and(program.is_fourfold, program.fused_loss)
    # With an in-place loss, the 16-bit logits are freed before their gradient is allocated.
    copies = np.where(program.in_place_loss, 1, 2)
    apart = np.where(program.eager_loss, step.item_bytes + 12 / layout.y, copies * step.item_bytes + sums)
    first = rows * columns * np.where(is_ours, in_place, apart)
    # In fp32, fourfold's matmul adds its result directly to the weight's gradient.
    adds = program.is_fourfold & (step.item_bytes == 4)
    first = first + np.where(adds, 0, step.item_bytes * weights)
    # Soft-capping stores two fp32 values per logit: the sum over y, and the derivative of the soft-cap.
    capped = np.where(model.caps_logits, 8 / layout.y, 0)
    # The sums of the next chunk are allocated before Python releases the sums of the previous chunk, so both count.
    then = np.minimum(rows, np.maximum(work.tokens - rows, 0))
    summed = np.maximum((np.where(layout.y > 1, step.item_bytes, 0) + 4) / layout.y, capped)
    second = rows * (step.item_bytes + 4 / layout.y) + then * (step.item_bytes + summed)
    second = columns * np.where(is_ours, (rows + then) * in_place, second)
    tokens = p.residual + np.where(layout.x > 1, p.residual, 0) + p.statistics + 2 * p.gathered
    # If the matmul adds its result directly to the summed gradients, there is no separate fp32 gradient.
    gradient = np.where(program.fuses_accumulation, 0, 4 * weights)
    return tokens + np.maximum(first, np.where(then > 0, second, 0)) + gradient


def head_kept_bytes(work: Workload) -> Number:
    """Return the bytes that head and loss hold until their backward pass: the hidden states of the tokens, the gradient
    of the hidden states, and the gradient of the head's weight."""
    model, layout = work.model, work.layout
    p = tensor_bytes(work)
    weight = work.step.item_bytes * model.padded_vocab_size * model.hidden_size / (layout.x * layout.y)
    return p.residual + p.gathered + p.statistics + weight
