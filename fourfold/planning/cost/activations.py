"""Bytes of activations on one rank: what each block keeps for its backward, and the most that is alive at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fourfold.planning.cases import Cases, Number
from fourfold.planning.workload import CONTEXTS, Workload


class Pieces(NamedTuple):
    """Bytes on the rank, of one micro-batch: residual [T/x, H/y], gathered [T, H/y], inner [T, F/x].

    queries and keys are those that attention reads here, whole_queries those of all ranks of y.
    """

    residual: Number
    gathered: Number
    queries: Number
    keys: Number
    whole_queries: Number
    inner: Number
    statistics: Number


def pieces(work: Workload) -> Pieces:
    token = work.bytes * work.tokens
    split = attention_over_y(work)
    # A rank holds whole the key-value heads that its queries read, once for each where they divide irregularly.
    heads = work.queries / work.head_dim / (work.x * np.where(split == "heads", work.y, 1))
    group = work.queries / work.keys
    kv_heads = np.where(heads % group == 0, heads / group, np.where(heads < group, 1, heads))
    return Pieces(
        residual=token * work.hidden / (work.y * np.where(work.split_residual, work.x, 1)),
        gathered=token * work.hidden / work.y,
        queries=token * work.queries / (work.x * work.y),
        keys=token * kv_heads * work.head_dim / np.where(split == "batch", work.y, 1),
        whole_queries=token * work.queries / work.x,
        inner=token * work.inner / work.x,
        statistics=4 * work.tokens / np.where(work.split_residual, work.x, 1),
    )


def attention_over_y(work: Workload) -> np.ndarray:
    """What the ranks of y share of the attention, as ``config.layout.attention_split`` tells of one layout."""
    heads = work.queries / work.head_dim
    return np.where(
        heads % (work.x * work.y) == 0, "heads", np.where(work.micro_batch % work.y == 0, "batch", "sequence")
    )


def kept_by_core(work: Workload) -> tuple[Number, Number]:
    """Bytes that attention keeps between the products before and behind it, without its output: computed once, and
    computed again."""
    p, split = pieces(work), attention_over_y(work)
    ranks = work.x * np.where(split == "heads", work.y, 1)
    gathered = (split == "sequence") | (work.keys % (ranks * work.head_dim) != 0)
    # Features arrive from the sum over y in one buffer, of which v keeps the whole alive where it is not gathered.
    one_buffer = (work.y > 1) & ~np.asarray(work.biases, bool) & ~gathered
    rotated = np.where(work.rope, p.queries + p.keys, 0)
    plain = np.where(work.rope, p.keys, p.queries + 2 * p.keys)
    qkv = np.where(one_buffer, p.queries + 2 * p.keys + rotated, plain + rotated)
    normed = np.where(work.head_norms, (p.queries + p.keys) * (1 + 4 / work.bytes), 0)
    # Without a fused kernel the softmax's output, dropout's output and its mask are kept for every pair of tokens.
    pairs = work.micro_batch * work.seq**2 / work.cp * heads_here(work)
    scores = np.where(work.flash, 0, 5 * pairs)
    # Some of the queries see other keys than a causal kernel would let them: which, is written out.
    mask = np.where(split == "sequence", work.bytes * work.seq**2 / work.y, 0)
    arriving = work.bytes * work.tokens * (work.queries + 2 * work.keys) / (work.x * work.y)
    return qkv + normed + log_sums(work) + scores + mask, arriving


def heads_here(work: Workload) -> Number:
    """Query heads of the rank; a part of one where ranks share it."""
    return work.queries / work.head_dim / (work.x * work.y)


def log_sums(work: Workload) -> Number:
    """Bytes of the logarithms of the softmax's sums, fp32, one for each query of each head."""
    return 4 * work.tokens * heads_here(work)


def kept_by_block(work: Workload, selective: bool) -> Number:
    """Bytes that one block keeps of a micro-batch, with nothing computed again or with selective recompute.

    As autograd keeps them in ``parallel``: the inputs of both norms, tokens as gathered for q, k, v and for up, what
    the attention kernel reads and writes, and of the MLP gate, up, silu(gate) and their product (GELU: its input and
    output).
    """
    p = pieces(work)
    core, core_again = kept_by_core(work)
    made_again = mlp_made_again(work)
    in_8 = np.asarray(work.inputs_in_8, bool)
    fused_away = np.where(np.asarray(work.fused_gate, bool) & (work.ups > work.inner), p.inner, 0)
    # As much stands before the activation as behind it.
    mlp = 2 * made_again - fused_away - np.where(in_8, p.inner / 2, 0)
    # Gathered inputs are kept as they are, or a share of them that is gathered again (Megatron-LM's way).
    shares = np.asarray(work.regather, bool) | (np.asarray(work.gathers_again, bool) & selective)
    tokens = np.where(shares, p.residual, p.gathered)
    # The output's product keeps what it gathered over y, and the attention kernel its own share besides.
    gathers = (work.y > 1) & ~shares
    out = np.where(gathers, p.whole_queries, p.queries)
    # So it does where heads are exchanged: the product reads what has come back.
    exchanged = (work.cp > 1) & np.equal(work.context, CONTEXTS.index("ulysses"))
    core = core + np.where(gathers | exchanged, p.queries, 0)
    # Side by side, attention and MLP have norms that read, and keep, the same.
    read = np.where(work.parallel_residual, 1, 2) * p.residual
    # The attention kernel keeps its output in 16 bits, whatever the product behind it reads.
    inputs = np.where(in_8, tokens + p.queries / 2, 2 * tokens)
    stream = read + 2 * p.statistics + inputs + out
    if not selective:
        return stream + core + mlp
    attention = np.where(work.attention_again, core_again, core)
    kept = stream + attention + mlp - np.where(work.mlp_again, made_again - fused_away, 0)
    products = work.queries + 2 * work.keys + 2 * work.hidden + work.ups
    per_op = p.residual + p.queries + log_sums(work) + work.bytes * work.tokens * products / (2 * work.x * work.y)
    return np.where(work.per_op, per_op, kept)


def mlp_made_again(work: Workload) -> Number:
    """Bytes behind the MLP's first products: silu(gate) and what it makes of up; GELU's output."""
    return np.where(work.ups > work.inner, 2, 1) * pieces(work).inner


def head_bytes(work: Workload) -> Number:
    """The most that head and loss need besides: tokens, their gradient, the weight's gradient in fp32, some logits."""
    p = pieces(work)
    columns = work.vocab / work.x
    weights = columns * work.hidden / work.y
    rows = np.minimum(work.tokens, np.maximum(1, np.floor(work.chunk_logits / columns / work.y)) * work.y)
    # The partial sums, the sums in fp32, and their gradient in the step's type, with the product of that gradient.
    sums = np.where(work.fused_loss, 0, 4 / work.y)
    first = rows * columns * (2 * work.bytes + sums) + work.bytes * weights
    # The next piece's sums are made while names still hold those of the piece before.
    then = np.minimum(rows, np.maximum(work.tokens - rows, 0))
    summed = (np.where(work.y > 1, work.bytes, 0) + 4) / work.y
    second = columns * (rows * (work.bytes + 4 / work.y) + then * (work.bytes + summed))
    tokens = p.residual + np.where(work.x > 1, p.residual, 0) + p.statistics + 2 * p.gathered
    return tokens + np.maximum(first, np.where(then > 0, second, 0)) + 4 * weights


def head_kept_bytes(work: Workload) -> Number:
    """What head and loss keep until their backward: tokens and their gradient, and the weight's."""
    p = pieces(work)
    return p.residual + p.gathered + p.statistics + work.bytes * work.vocab * work.hidden / (work.x * work.y)


def backward_bytes(work: Workload) -> tuple[Number, Number]:
    """The most that the backward of one block needs besides what the forward has kept, where weights are sharded over
    data, and where they are not: there a gradient is in fp32 at once."""
    p = pieces(work)
    weight = work.hidden * work.inner / (work.x * work.y)
    down = p.inner + p.gathered + work.bytes * weight
    activation = mlp_made_again(work)  # of as much the gradients, before it
    sharded, replicated = (np.maximum(activation + size * weight, down) for size in (work.bytes, 4))
    return p.residual + sharded, p.residual + replicated


def is_replicated(work: Workload) -> Number:
    """Whether every rank has whole weights and gradients, as ``parallel.replicated`` keeps them."""
    return (work.z == 1) & ((work.zero == 0) | (work.dp * work.cp == 1))


def kept_weights(work: Workload) -> tuple[Number, Number]:
    """Weights between forward and backward under zero 1 and 2, as z-th parts (docs/parallelism.md): of one block, and
    of the tables."""
    keeps = (work.zero > 0) & (work.zero < 3) & (work.z > 1)
    entry = np.where(keeps, work.bytes / (work.x * work.y * work.z), 0)
    tables = (work.positions + np.where(work.tied, 0, work.vocab)) * work.hidden
    return entry * work.block_weights, entry * tables


@dataclass(frozen=True)
class BlockBytes(Cases):
    """Of one micro-batch: what a block keeps with nothing computed again, with selective recompute, and with full; what
    its backward (``backward_bytes``), a recomputed MLP in it, and head and loss need besides, and what these keep until
    their backward. They depend on x, y, cp, its context and the micro-batch alone."""

    whole: Number
    selective: Number
    full: Number
    backward: Number
    backward_replicated: Number
    mlp_again: Number
    head: Number
    head_kept: Number


def block_bytes(work: Workload) -> BlockBytes:
    """Of each case of ``work``."""
    return BlockBytes(
        kept_by_block(work, False),
        kept_by_block(work, True),
        pieces(work).residual,
        *backward_bytes(work),
        mlp_made_again(work),
        head_bytes(work),
        head_kept_bytes(work),
    )


def peak_bytes(
    work: Workload, layers: Number, in_flight: Number, has_head: Number = True, block: BlockBytes | None = None
) -> Number:
    """The most that is alive at once on a rank that holds ``layers`` blocks of ``in_flight`` micro-batches."""
    block = block_bytes(work) if block is None else block
    full = work.recompute == 2
    light = np.where(full, np.where(work.offload, 0, block.full), np.where(work.recompute == 1, block.selective,
                                                                           block.whole))  # fmt: skip
    recomputed = np.ceil(layers / work.every)
    kept = recomputed * light + (layers - recomputed) * block.whole
    kept = kept + np.where(work.pp > 1, work.stage_keeps, 0) * block.full
    inputs = 16 * work.micro_batch * work.seq * work.micro_batches + np.where(
        work.rope, 4 * work.seq * work.head_dim, 0
    )
    backward = np.where(is_replicated(work), block.backward_replicated, block.backward)
    # The head's part of a tied weight's gradient waits for the embedding's.
    tied = np.asarray(work.tied, bool) & (work.pp == 1)
    waiting = np.where(tied, work.bytes * work.vocab * work.hidden / (work.x * work.y), 0)
    of_block, of_tables = kept_weights(work)
    weights = layers * of_block + of_tables
    mlp_again = np.asarray(work.mlp_again, bool) & (work.recompute == 1) & ~np.asarray(work.per_op, bool)
    again = np.where(full, block.whole, np.where(mlp_again, block.mlp_again, 0))
    # A block's own weights are whole in its backward, and counted as such.
    in_block = again + backward + waiting + weights - of_block
    # Elsewhere the backward of a micro-batch's head follows its forward at once.
    heads_wait = np.where(has_head & (work.pp > 1) & work.forwards_first, in_flight - 1, 0)
    kept = in_flight * kept + heads_wait * block.head_kept
    return kept + inputs + np.maximum(np.where(has_head, block.head, 0) + weights, in_block)
