"""Compute the bytes of one block's tensors on a rank, and how the ranks of the tensor axis y share attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.workload import CP_METHODS, Workload

LEAST_QUERIES, CAPPED_QUERIES = 16, 512
"""Smallest and largest number of queries in one piece of attention that runs as separate operations."""

WIDEST_FLASH, WIDEST_CUDNN = 256, 128
"""The largest ``head_dim`` that FlashAttention's kernels support, and the largest that a ring gives to cuDNN."""


class TensorBytes(NamedTuple):
    """Bytes of one micro-batch's tensors on a rank: residual [T/x, H/y], gathered [T, H/y], inner [T, F/x].

    queries and keys are the inputs of attention on this rank, and whole_queries are the queries of all y ranks.
    """

    residual: Number
    gathered: Number
    queries: Number
    keys: Number
    whole_queries: Number
    inner: Number
    statistics: Number


def tensor_bytes(work: Workload) -> TensorBytes:
    model, layout, program = work.model, work.layout, work.program
    token = work.step.item_bytes * work.tokens
    at_once = np.where(program.tiled_mlp, np.minimum(model.hidden_size / work.tokens, 1), 1)
    split = attention_over_y(work)
    # A group is the query heads that share a key-value head. If a rank has whole groups, or a part of one group, it
    # holds each key-value head once. Otherwise it holds a copy of the key-value head for each query head.
    heads = model.queries / model.head_dim / (layout.x * np.where(split == "heads", layout.y, 1))
    group = model.queries / model.keys
    kv_heads = np.where(heads % group == 0, heads / group, np.where(heads < group, 1, heads))
    return TensorBytes(
        residual=token * model.hidden_size / (layout.y * np.where(program.split_residual, layout.x, 1)),
        gathered=token * model.hidden_size / layout.y,
        queries=token * model.queries / (layout.x * layout.y),
        keys=token * kv_heads * model.head_dim / np.where(split == "batch", layout.y, 1),
        whole_queries=token * model.queries / layout.x,
        inner=token * model.mean_inner / layout.x * at_once,
        statistics=4 * work.tokens / np.where(program.split_residual, layout.x, 1),
    )


def attention_over_y(work: Workload) -> np.ndarray:
    """Return the dimension along which the y ranks share attention, as in ``config.layout.attention_split``."""
    model, layout = work.model, work.layout
    heads = model.queries / model.head_dim
    return np.where(
        heads % (layout.x * layout.y) == 0,
        "heads",
        np.where(work.sequences_per_part % layout.y == 0, "batch", "sequence"),
    )


def copies_heads(work: Workload) -> Flag:
    """Return whether attention copies its inputs to get whole sequences of its heads, and copies its outputs back."""
    is_own = np.asarray(work.program.is_fourfold, bool)
    copies: Flag = is_own & (work.layout.x > 1) & (work.sequences_per_part > 1) & (attention_over_y(work) == "heads")
    return copies


def is_ring(work: Workload) -> Flag:
    """Return whether cp ranks pass keys and values around a ring."""
    rings: Flag = (work.layout.cp > 1) & np.equal(work.layout.cp_method, CP_METHODS.index("ring"))
    return rings


def heads_on_rank(work: Workload) -> Number:
    """Return the number of query heads on a rank, or a fraction of one head if several ranks share it."""
    model, layout = work.model, work.layout
    return model.queries / model.head_dim / (layout.x * layout.y)


def log_sum_exp_bytes(work: Workload) -> Number:
    """Return the bytes of the log-sum-exps in fp32, one for each query of each head."""
    return 4 * work.tokens * heads_on_rank(work)


class CappedScores(NamedTuple):
    """Sizes of one block's attention with soft-capped scores, which runs as separate operations.

    The fields are the number of heads on the rank (heads of all sequences), the number of queries and the number of
    keys whose scores exist at the same time, the mean number of scores per query and head, and the number of pieces.
    """

    heads: Number
    queries: Number
    keys: Number
    computed: Number
    pieces: Number


def caps_scores(work: Workload) -> Flag:
    """Return whether fourfold's attention soft-caps the scores. If it does, no fused kernel can compute it."""
    caps: Flag = np.asarray(work.model.caps_scores, bool) & np.asarray(work.program.is_fourfold, bool)
    return caps


def capped_scores(work: Workload) -> CappedScores:
    """Return the sizes and the number of pieces of attention with soft-capped scores. The pieces are the ones that
    ``document_attention``, ``block_attention``, and the ring in ``parallel.attention`` compute."""
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
    """Return the bytes that FlashAttention's backward allocates and frees, as ``recorder.flash_backward_bytes`` counts
    them in the trace of a GPU run. Return 0 if attention does not use this kernel."""
    model, layout, seq = work.model, work.layout, work.step.seq_length
    split = attention_over_y(work)
    ring = is_ring(work)
    tokens = seq / np.where(ring, layout.cp, 1)
    # Total number of heads: heads per sequence times the sequences of one batch part.
    heads = work.sequences_per_part * heads_on_rank(work) / np.where(ring, 1, layout.cp)
    width = np.ceil(model.head_dim / 8) * 8
    multiple = np.where(width <= 128, 32, 64)
    summed = np.ceil(width / multiple) * multiple
    # Attention with windows uses the packed kernel, which pads differently.
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
