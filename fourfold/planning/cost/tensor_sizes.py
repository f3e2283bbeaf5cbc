"""Compute the bytes of one block's tensors on a rank, and determine how the ranks of the tensor axis y divide
attention."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.workload import CP_METHODS, Workload

LEAST_QUERIES, CAPPED_QUERIES = 16, 512
"""Smallest and largest number of queries in one piece of attention with soft-capped scores. Such attention runs piece
by piece."""

WIDEST_FLASH, WIDEST_CUDNN = 256, 128
"""Largest ``head_dim`` that FlashAttention's kernels support, and largest ``head_dim`` for which ring attention uses
cuDNN."""


class TensorBytes(NamedTuple):
    """Bytes of one micro-batch's tensors on a rank, with T tokens, hidden size H, and MLP width F.

    - residual: the residual stream between layers [T/x, H/y].
    - gathered: the residual stream after an all-gather over x [T, H/y].
    - queries, keys: inputs of attention on this rank. The values have as many bytes as the keys.
    - whole_queries: the queries of all y ranks.
    - inner: one intermediate tensor of the MLP [T, F/x].
    - statistics: one fp32 statistic of a norm per token [T/x].
    """

    residual: Number
    gathered: Number
    queries: Number
    keys: Number
    whole_queries: Number
    inner: Number
    statistics: Number


def tensor_bytes(work: Workload) -> TensorBytes:
    """Return the bytes of one micro-batch's tensors on a rank, for each case of ``work``, such as one layout."""
    model, layout, program = work.model, work.layout, work.program
    token = work.step.item_bytes * work.tokens
    at_once = np.where(program.tiled_mlp, np.minimum(model.hidden_size / work.tokens, 1), 1)
    split = attention_over_y(work)
    # A group consists of the query heads that share a key-value head. If a rank has complete groups, or a part of one
    # group, it holds each of its key-value heads once. Otherwise it holds one copy of a key-value head for each of its
    # query heads.
    heads = model.queries / model.head_dim / (layout.x * np.where(split == "heads", layout.y, 1))
    group = model.queries / model.keys
    kv_heads = np.where(heads % group == 0, heads / group, np.where(heads < group, 1, heads))
    return TensorBytes(
        residual=token
        * np.where(program.autocast, 4 / work.step.item_bytes, 1)
        * model.hidden_size
        / (layout.y * np.where(program.split_residual, layout.x, 1)),
        gathered=token * model.hidden_size / layout.y,
        queries=token * model.queries / (layout.x * layout.y),
        keys=token * kv_heads * model.head_dim / np.where(split == "batch", layout.y, 1),
        whole_queries=token * model.queries / layout.x,
        inner=token * model.mean_inner / layout.x * at_once,
        statistics=4 * work.tokens / np.where(program.split_residual, layout.x, 1),
    )


def mlp_made_again(work: Workload) -> Number:
    """Return the bytes of the MLP's tensors that selective recompute can compute again. These tensors are silu(gate)
    and silu(gate) · up in an MLP with a gate, and GELU's output in an MLP without a gate."""
    model = work.model
    return np.where(model.mean_gate_up > model.mean_inner, 2, 1) * tensor_bytes(work).inner


def attention_over_y(work: Workload) -> np.ndarray:
    """Return what the y ranks divide among themselves in attention: "heads", "batch", or "sequence" (see
    ``config.layout.attention_split``)."""
    model, layout = work.model, work.layout
    heads = model.queries / model.head_dim
    return np.where(
        heads % (layout.x * layout.y) == 0,
        "heads",
        np.where(work.sequences_per_part % layout.y == 0, "batch", "sequence"),
    )


def copies_heads(work: Workload) -> Flag:
    """Return whether fourfold copies the inputs of attention so that the tokens of each sequence are contiguous, and
    copies the outputs back."""
    is_own = np.asarray(work.program.is_fourfold, bool)
    copies: Flag = is_own & (work.layout.x > 1) & (work.sequences_per_part > 1) & (attention_over_y(work) == "heads")
    return copies


def is_ring(work: Workload) -> Flag:
    """Return whether the cp ranks pass keys and values around a ring."""
    rings: Flag = (work.layout.cp > 1) & np.equal(work.layout.cp_method, CP_METHODS.index("ring"))
    return rings


def heads_on_rank(work: Workload) -> Number:
    """Return the number of query heads per rank if x and y split them. The number is not whole if ranks share a
    head."""
    model, layout = work.model, work.layout
    return model.queries / model.head_dim / (layout.x * layout.y)


def log_sum_exp_bytes(work: Workload) -> Number:
    """Return the bytes of attention's log-sum-exps, one fp32 value per query and head."""
    return 4 * work.tokens * heads_on_rank(work)


class CappedScores(NamedTuple):
    """Sizes of one block's attention if scores are soft-capped. Such attention runs piece by piece, as separate
    operations.

    - heads: number of heads on the rank, summed over all sequences.
    - queries, keys: number of queries and of keys in one piece, whose scores are in memory together.
    - computed: mean number of scores per query and head.
    - pieces: number of pieces that one block runs on the rank.
    """

    heads: Number
    queries: Number
    keys: Number
    computed: Number
    pieces: Number


def caps_scores(work: Workload) -> Flag:
    """Return whether the framework is fourfold and the model soft-caps attention scores. No fused kernel supports
    soft-capping."""
    caps: Flag = np.asarray(work.model.caps_scores, bool) & np.asarray(work.program.is_fourfold, bool)
    return caps


def capped_scores(work: Workload) -> CappedScores:
    """Return the sizes of the pieces of attention with soft-capped scores. In ``parallel.attention``, the modules
    ``document_attention``, ``block_attention``, and ``ring`` divide attention into these pieces."""
    model, layout, seq = work.model, work.layout, work.step.seq_length
    shares_queries = attention_over_y(work) == "sequence"
    ring = is_ring(work)
    heads = layout.micro_batch_size * heads_on_rank(work) * np.where(shares_queries, layout.y, 1)
    here = seq / np.where(shares_queries, layout.y, 1) / np.where(ring, layout.cp, 1)
    queries, keys = np.minimum(here, CAPPED_QUERIES), seq / np.where(ring, layout.cp, 1)
    whole = np.where(shares_queries, seq, np.where(ring, (seq + keys) / 2, (seq + queries) / 2))
    some = np.minimum(np.maximum(model.sliding_window, LEAST_QUERIES), queries)
    near = np.where(shares_queries | ring, whole, np.minimum(some + model.sliding_window, whole))
    only_slides = np.equal(model.sliding, 1) & ~np.asarray(shares_queries | ring, bool)
    return CappedScores(
        heads / np.where(ring, 1, layout.cp),
        np.where(only_slides, some, queries),
        np.where(only_slides, np.minimum(some + model.sliding_window, keys), keys),
        (1 - model.sliding) * whole + model.sliding * near,
        here * ((1 - model.sliding) / queries + model.sliding / some) * np.where(ring, layout.cp, 1),
    )


def flash_workspace(work: Workload) -> Number:
    """Return the bytes that the backward pass of FlashAttention allocates and frees, as
    ``recorder.flash_backward_bytes`` counts them when it traces a GPU run. Return 0 if attention does not use this
    kernel."""
    model, layout, seq = work.model, work.layout, work.step.seq_length
    split = attention_over_y(work)
    ring = is_ring(work)
    tokens = seq / np.where(ring, layout.cp, 1)
    # The number of heads, summed over all sequences of a batch part.
    heads = work.sequences_per_part * heads_on_rank(work) / np.where(ring, 1, layout.cp)
    width = np.ceil(model.head_dim / 8) * 8
    multiple = np.where(width <= 128, 32, 64)
    summed = np.ceil(width / multiple) * multiple
    # Attention with windows uses the kernel for packed sequences, which pads rows differently.
    rows = model.sliding * (tokens + 128) + (1 - model.sliding) * np.ceil(tokens / 128) * 128
    accumulated = 4 * heads * rows * (summed + 1)
    expanded = np.where(model.keys == model.queries, 0, 4 * heads * tokens * width)
    has_kernel = (
        np.asarray(work.program.flash, bool)
        & (work.step.item_bytes == 2)
        & (model.head_dim <= WIDEST_FLASH)
        & (split != "sequence")
        & ~caps_scores(work)
    )
    return np.where(has_kernel, accumulated + expanded, 0)
